"""The provenance key: what changes it, what does not, and what a difference says."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolbuild.core.digest import Digest
from smolbuild.core.errors import VerificationError
from smolbuild.model.artifact import BaseInfo
from smolbuild.model.contract import Contract
from smolbuild.model.declared import DeclaredFiles, FileEntry
from smolbuild.model.explain import Side, explain
from smolbuild.model.key import EXCLUDED, KeyInputs, build_key_tree, provenance_key, step_chain
from smolbuild.model.keytree import Change, KeyTree, tree_from_json
from smolbuild.model.parse import parse_text
from smolbuild.model.smolfile import (
    Base,
    CachePolicy,
    Copy,
    ExecProbe,
    FileProbe,
    Health,
    HttpProbe,
    Network,
    Notice,
    Policy,
    PortProbe,
    Restart,
    RestoreContract,
    Scrub,
    SecretSource,
    Service,
    Smolfile,
    Step,
)

ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


def digest(letter: str) -> Digest:
    return Digest("sha256:" + letter * 64)


def file(path: str, letter: str = "a", *, executable: bool = False) -> FileEntry:
    return FileEntry(path=path, kind="file", digest=digest(letter), executable=executable, size=1)


CONTRACT = Contract(
    engine="qemu",
    engine_version="7.2",
    machine_type="microvm",
    cpu_model="max",
    accelerator="tcg",
    architecture="x86_64",
)
SMOLFILE = Smolfile(
    path=Path("Smolfile"),
    image="x",
    env=(("PORT", "80"), ("MODE", "a")),
    memory=512,
    network=Network(mode="allow", allow_hosts=("a.example.com", "b.example.com")),
    health=Health(probe=HttpProbe(port=80), interval=0.5),
    copy=(Copy(source="src", to="/app"),),
    steps=(
        Step(name="init-1", run="one"),
        Step(
            name="seed",
            run="two",
            inputs=("seed.sql",),
            copy=(Copy(source="extra", to="/"),),
            env=(("A", "1"),),
            secrets=("TOKEN",),
        ),
    ),
    services=(Service(name="api", run="serve", ready=PortProbe(port=80)),),
    restore=RestoreContract(run=("refresh",)),
    secrets={"TOKEN": SecretSource(from_env="TOKEN")},
)
FILES = DeclaredFiles(
    context=Path("/somewhere"),
    selections={
        "src": (FileEntry(path="src", kind="dir"), file("src/a"), file("src/b", "b")),
        "seed.sql": (file("seed.sql", "c"),),
        "extra": (FileEntry(path="extra", kind="symlink", target="src/a"),),
    },
)
INPUTS = KeyInputs(
    base=digest("1"),
    kernel=digest("2"),
    initramfs=digest("3"),
    agent=digest("4"),
    contract=CONTRACT,
    smolfile=SMOLFILE,
    files=FILES,
)
KNOWN_KEY = "sha256:3e6353e8a765d5f92931ce5d452654cebca3504a4505aee88293ac9e200d64ef"
KNOWN_CHAIN = "sha256:f52a2685d11970b3bdc34c38a8c670c59e6fab5ec271e80f3f58e2cd9a847d1f"


def key_of(inputs: KeyInputs) -> Digest:
    return provenance_key(build_key_tree(inputs))


def smolfile_with(**changes: Any) -> KeyInputs:
    return dataclasses.replace(INPUTS, smolfile=dataclasses.replace(SMOLFILE, **changes))


def step_with(index: int, **changes: Any) -> KeyInputs:
    steps = list(SMOLFILE.steps)
    steps[index] = dataclasses.replace(steps[index], **changes)
    return smolfile_with(steps=tuple(steps))


def files_with(**selections: tuple[FileEntry, ...]) -> KeyInputs:
    names = {name.replace("_", "."): found for name, found in selections.items()}
    files = dataclasses.replace(FILES, selections={**FILES.selections, **names})
    return dataclasses.replace(INPUTS, files=files)


def explained(before: KeyInputs, after: KeyInputs) -> tuple[Change, ...]:
    return explain(Side(tree=build_key_tree(before)), Side(tree=build_key_tree(after)))


def texts(inputs: KeyInputs) -> list[str]:
    return [str(change) for change in explained(INPUTS, inputs)]


# Every field is either in the key or excluded with a reason

OTHER: Mapping[str, Mapping[str, Any]] = {
    "Smolfile": {
        "path": Path("/elsewhere/Smolfile"),
        "image": "y",
        "entrypoint": ("e",),
        "cmd": ("c",),
        "env": (("PORT", "81"),),
        "imported_env": ("PORT",),
        "ca_files": ("ca.pem",),
        "workdir": "/w",
        "user": "u",
        "cpus": 9,
        "memory": 1024,
        "storage": 9,
        "overlay": 9,
        "ports": ((1, 1),),
        "volumes": ("a:/a",),
        "network": Network(),
        "health": None,
        "restart": Restart(max_retries=3),
        "secrets": {"TOKEN": SecretSource(from_file="/x")},
        "platform": "linux/arm64",
        "name": "n",
        "use_dev": True,
        "resume": "disk",
        "kernel": "k",
        "base": Base(debian="sid"),
        "copy": (Copy(source="src", to="/b"),),
        "steps": (),
        "services": (),
        "restore": RestoreContract(),
        "policy": Policy(max_age=1.0),
        "cache": CachePolicy(max_size=1),
        "scrub": Scrub(run=()),
        "sources": (("Smolfile", digest("5")),),
        "sibling": Path("smolbuild.toml"),
        "positions": {"image": 3},
        "notices": (Notice(key="k", line=1, text="t"),),
    },
    "Step": {
        "name": "other",
        "run": "three",
        "line": 77,
        "key": "k",
        "inputs": ("src",),
        "copy": (Copy(source="src", to="/x"),),
        "env": (("A", "2"),),
        "workdir": "/w",
        "user": "u",
        "network": False,
        "secrets": ("OTHER",),
        "timeout": 1.0,
    },
    "Service": {
        "name": "other",
        "run": "other",
        "line": 77,
        "key": "k",
        "ready": FileProbe(path="/x"),
        "ready_timeout": 1.0,
        "env": (("A", "1"),),
        "workdir": "/w",
        "user": "u",
    },
    "Copy": {"source": "extra", "to": "/y", "mode": 0o600, "owner": "u", "key": "k"},
    "Health": {
        "probe": ExecProbe(argv=("x",)),
        "interval": 1.0,
        "timeout": 1.0,
        "startup_grace": 1.0,
        "retries": 9,
    },
    "HttpProbe": {"port": 81, "path": "/p", "host": "10.0.0.1", "status": 204, "contains": "x"},
    "PortProbe": {"port": 81, "host": "10.0.0.1"},
    "FileProbe": {"path": "/other"},
    "ExecProbe": {"argv": ("a", "b")},
    "Network": {
        "mode": "full",
        "allow_hosts": ("c.example.com",),
        "allow_host_patterns": ("*.example.com",),
        "allow_cidrs": ("10.0.0.0/8",),
    },
    "Scrub": {"run": (), "allow": ("/x",)},
    "RestoreContract": {"regenerate": ("machine-id",), "run": (), "hold": True},
    "KeyInputs": {
        "base": digest("9"),
        "kernel": digest("9"),
        "initramfs": digest("9"),
        "agent": digest("9"),
        "authorities": (digest("9"),),
    },
    "Contract": {
        "engine": "x",
        "engine_version": "8",
        "machine_type": "x",
        "cpu_model": "x",
        "accelerator": "kvm",
        "architecture": "aarch64",
    },
}


def probed(probe: Any) -> KeyInputs:
    return smolfile_with(health=dataclasses.replace(SMOLFILE.health, probe=probe))  # type: ignore[type-var]


def changed(kind: str, field: str, value: Any) -> tuple[KeyInputs, KeyInputs]:
    """Return inputs before and after a change of one field of one class."""
    change = {field: value}
    whole: Mapping[str, Any] = {
        "Smolfile": lambda: smolfile_with(**change),
        "Step": lambda: step_with(1, **change),
        "Service": lambda: smolfile_with(
            services=(dataclasses.replace(SMOLFILE.services[0], **change),)
        ),
        "Copy": lambda: smolfile_with(copy=(dataclasses.replace(SMOLFILE.copy[0], **change),)),
        "Health": lambda: smolfile_with(health=dataclasses.replace(SMOLFILE.health, **change)),  # type: ignore[type-var]
        "Network": lambda: smolfile_with(network=dataclasses.replace(SMOLFILE.network, **change)),
        "RestoreContract": lambda: smolfile_with(
            restore=dataclasses.replace(SMOLFILE.restore, **change)
        ),
        "Scrub": lambda: smolfile_with(scrub=dataclasses.replace(SMOLFILE.scrub, **change)),
        "KeyInputs": lambda: dataclasses.replace(INPUTS, **change),
        "Contract": lambda: dataclasses.replace(
            INPUTS, contract=dataclasses.replace(CONTRACT, **change)
        ),
    }
    if kind in whole:
        return INPUTS, whole[kind]()
    probes = {
        "HttpProbe": HttpProbe(port=80),
        "PortProbe": PortProbe(port=80),
        "FileProbe": FileProbe(path="/x"),
        "ExecProbe": ExecProbe(argv=("a",)),
    }
    probe = probes[kind]
    return probed(probe), probed(dataclasses.replace(probe, **change))  # type: ignore[type-var]


CLASSES = [Smolfile, Step, Service, Copy, Health, Network, RestoreContract, Scrub, Contract]
CLASSES += [HttpProbe, PortProbe, FileProbe, ExecProbe]
FIELDS = [(kind.__name__, field.name) for kind in CLASSES for field in dataclasses.fields(kind)]
FIELDS += [("KeyInputs", name) for name in ("base", "kernel", "initramfs", "agent", "authorities")]


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_every_field_is_in_the_key_or_excluded_with_a_reason(kind: str, field: str) -> None:
    before, after = changed(kind, field, OTHER[kind][field])
    assert before != after or f"{kind}.{field}" in EXCLUDED
    same = key_of(before) == key_of(after)
    if f"{kind}.{field}" in EXCLUDED:
        assert same, f"{kind}.{field} is excluded, but changes the key"
    else:
        assert not same, f"{kind}.{field} is neither in the key nor in EXCLUDED"


def test_every_exclusion_is_of_a_field_and_has_a_reason() -> None:
    assert set(EXCLUDED) <= {f"{kind}.{field}" for kind, field in FIELDS}
    assert all(len(reason) > 15 for reason in EXCLUDED.values())


# Properties

words = st.text("abcdefgh", min_size=1, max_size=6)
steps = st.lists(st.tuples(words, words), min_size=1, max_size=4, unique_by=lambda pair: pair[0])


@given(words, words)
def test_an_env_value_changes_the_key_and_its_order_does_not(one: str, two: str) -> None:
    before = smolfile_with(env=(("A", one), ("B", "x")))
    after = smolfile_with(env=(("A", two), ("B", "x")))
    assert (key_of(before) == key_of(after)) == (one == two)
    assert key_of(before) == key_of(smolfile_with(env=(("B", "x"), ("A", one))))


@given(steps, st.data())
def test_the_chain_depends_on_the_steps_so_far_and_on_nothing_later(
    pairs: list[tuple[str, str]], data: st.DataObject
) -> None:
    before = tuple(Step(name=name, run=run) for name, run in pairs)
    index = data.draw(st.integers(0, len(pairs) - 1))
    after = list(before)
    after[index] = dataclasses.replace(before[index], run=before[index].run + "x")
    old, new = (
        step_chain(smolfile_with(steps=before)),
        step_chain(smolfile_with(steps=tuple(after))),
    )
    assert len(old) == len(pairs) + 1
    assert old[: index + 1] == new[: index + 1]
    assert all(a != b for a, b in zip(old[index + 1 :], new[index + 1 :], strict=True))
    assert len(set(old)) == len(old)


@pytest.mark.parametrize(
    ("inputs", "same"),
    [
        (smolfile_with(services=()), 3),
        (smolfile_with(health=None), 3),
        (smolfile_with(restore=RestoreContract()), 3),
        (smolfile_with(entrypoint=("x",)), 3),
        (smolfile_with(resume="disk"), 3),
        (step_with(1, name="renamed"), 3),
        (step_with(1, timeout=9.0), 3),
        (step_with(1, secrets=("X",)), 2),
        (step_with(1, user="u"), 2),
        (step_with(1, workdir="/w"), 2),
        (step_with(1, env=()), 2),
        (step_with(1, network=False), 2),
        (files_with(seed_sql=(file("seed.sql", "d"),)), 2),
        (files_with(extra=(FileEntry(path="extra", kind="symlink", target="x"),)), 2),
        (step_with(0, run="other"), 1),
        (smolfile_with(network=Network(mode="full")), 1),
        (smolfile_with(env=()), 0),
        (smolfile_with(user="u"), 0),
        (smolfile_with(workdir="/w"), 0),
        (smolfile_with(memory=1024), 0),
        (smolfile_with(cpus=1), 0),
        (smolfile_with(overlay=1), 0),
        (smolfile_with(copy=()), 0),
        (files_with(src=(FileEntry(path="src", kind="dir"), file("src/a"))), 0),
        (files_with(src=(FileEntry(path="src", kind="dir"), file("src/a", executable=True))), 0),
        (dataclasses.replace(INPUTS, base=digest("9")), 0),
        (dataclasses.replace(INPUTS, kernel=digest("9")), 0),
        (dataclasses.replace(INPUTS, initramfs=digest("9")), 0),
        (dataclasses.replace(INPUTS, agent=digest("9")), 0),
        (
            dataclasses.replace(
                INPUTS, contract=dataclasses.replace(CONTRACT, architecture="aarch64")
            ),
            0,
        ),
    ],
)
def test_how_much_of_the_chain_stays(inputs: KeyInputs, same: int) -> None:
    old, new = step_chain(INPUTS), step_chain(inputs)
    assert [a == b for a, b in zip(old, new, strict=False)] == [True] * same + [False] * (3 - same)


@given(words, words)
@settings(max_examples=50)
def test_two_texts_give_one_key_exactly_when_they_mean_the_same(one: str, two: str) -> None:
    def built(text: str) -> Digest:
        smolfile = parse_text(text, file="Smolfile")
        return key_of(dataclasses.replace(INPUTS, smolfile=smolfile, files=FILES))

    first = built(f'image = "x"\ninit = ["{one}"]\n[health]\nexec = ["a"]\ninterval = "1s"\n')
    again = built(
        f'# moved\nhealth = {{ interval = "1000ms", exec = ["a"] }}\ninit = ["{one}"]\nimage="x"'
    )
    other = built(f'image = "x"\ninit = ["{two}"]\n[health]\nexec = ["a"]\ninterval = "1s"\n')
    assert first == again
    assert (first == other) == (one == two)


def test_the_key_of_known_inputs_never_changes() -> None:
    """A changed value here means that every artifact is built anew: raise KEY_FORMAT knowingly."""
    assert key_of(INPUTS) == KNOWN_KEY
    assert step_chain(INPUTS)[-1] == KNOWN_CHAIN


# Differences


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (INPUTS, []),
        (smolfile_with(memory=1024), ["memory: 512 -> 1024"]),
        (smolfile_with(user="app"), ["user: none -> app"]),
        (smolfile_with(env=(("PORT", "81"), ("MODE", "a"))), ["env PORT: 80 -> 81"]),
        (smolfile_with(env=(("PORT", "80"),)), ["env MODE: removed"]),
        (smolfile_with(env=(*SMOLFILE.env, ("X", "1"))), ["env X: added"]),
        (smolfile_with(cmd=("serve", "-v")), ["cmd: none -> [serve, -v]"]),
        (step_with(0, run="three"), ['step init-1: run "one" -> "three"']),
        (step_with(1, run="x" * 90), ["step seed: run changed (1 line added, 1 removed)"]),
        (step_with(1, run="two\nb"), ["step seed: run changed (1 line added, 0 removed)"]),
        (step_with(1, env=(("A", "2"),)), ["step seed: env A: 1 -> 2"]),
        (step_with(0, user="u"), ["step init-1: user none -> u"]),
        (step_with(1, secrets=("TOKEN", "B")), ["step seed: secrets + B"]),
        (
            step_with(1, network=False),
            [
                "step seed: network mode allow -> off",
                "step seed: network allow_hosts - a.example.com, - b.example.com",
            ],
        ),
        (
            smolfile_with(
                network=Network(mode="allow", allow_hosts=("a.example.com", "c.example.com"))
            ),
            ["network: allow_hosts + c.example.com, - b.example.com"],
        ),
        (
            step_with(1, copy=(Copy(source="extra", to="/", mode=0o755),)),
            ["step seed: copy extra to /: mode none -> 0755"],
        ),
        (
            smolfile_with(copy=(Copy(source="extra", to="/x"), *SMOLFILE.copy)),
            ["copy extra to /x: added"],
        ),
        (
            files_with(seed_sql=(file("seed.sql", "d"),)),
            [f"seed.sql: content sha256:{'c' * 12}{ELLIPSIS} -> {'d' * 12}{ELLIPSIS}"],
        ),
        (
            files_with(seed_sql=(file("seed.sql", "c", executable=True),)),
            ["seed.sql: mode 0644 -> 0755"],
        ),
        (
            files_with(extra=(FileEntry(path="extra", kind="symlink", target="src/b"),)),
            ["extra: target src/a -> src/b"],
        ),
        (files_with(extra=(file("extra"),)), ["extra: symlink -> file"]),
        (
            files_with(src=(FileEntry(path="src", kind="dir"), file("src/b", "b"), file("src/c"))),
            ["src/a: removed", "src/c: added"],
        ),
        (smolfile_with(services=()), ["service api: removed"]),
        (
            smolfile_with(services=(dataclasses.replace(SMOLFILE.services[0], run="x"),)),
            ['service api: run "serve" -> "x"'],
        ),
        (step_with(1, name="fill"), ["step seed: renamed to fill"]),
        (
            smolfile_with(steps=SMOLFILE.steps[::-1]),
            ["order: step init-1, step seed -> step seed, step init-1"],
        ),
        (smolfile_with(health=None), ["health: removed (http 127.0.0.1:80/, status 200)"]),
        (
            smolfile_with(health=dataclasses.replace(SMOLFILE.health, interval=1.0)),  # type: ignore[type-var]
            ["health: interval 500 ms -> 1000 ms"],
        ),
        (smolfile_with(restore=RestoreContract()), ["restore: run [refresh] -> []"]),
        (
            dataclasses.replace(INPUTS, base=digest("9")),
            [f"base: sha256:{'1' * 12}{ELLIPSIS} -> {'9' * 12}{ELLIPSIS}"],
        ),
        (
            dataclasses.replace(INPUTS, contract=dataclasses.replace(CONTRACT, accelerator="kvm")),
            ["accelerator: tcg -> kvm"],
        ),
        (
            dataclasses.replace(INPUTS, contract=dataclasses.replace(CONTRACT, engine_version="8")),
            ["engine version: 7.2 -> 8"],
        ),
    ],
)
def test_what_a_difference_says(inputs: KeyInputs, expected: list[str]) -> None:
    assert texts(inputs) == expected


@given(st.sampled_from(FIELDS), st.sampled_from(FIELDS))
@settings(max_examples=200)
def test_there_is_a_difference_exactly_when_the_keys_differ(
    one: tuple[str, str], two: tuple[str, str]
) -> None:
    first = build_key_tree(changed(*one, OTHER[one[0]][one[1]])[1])
    second = build_key_tree(changed(*two, OTHER[two[0]][two[1]])[1])
    same = provenance_key(first) == provenance_key(second)
    assert (explain(Side(tree=first), Side(tree=second)) == ()) == same


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_changed_field_is_named_and_said_to_reach_as_far_as_it_does(
    kind: str, field: str
) -> None:
    """The steps that run again, by the explanation, are those whose chain keys are new."""
    before, after = changed(kind, field, OTHER[kind][field])
    changes = explained(before, after)
    assert bool(changes) == (f"{kind}.{field}" not in EXCLUDED)
    assert all(change.text.isprintable() for change in changes)
    assert said_to_differ(changes) == first_to_differ(before, after)


@pytest.mark.parametrize(
    "after",
    [
        smolfile_with(steps=SMOLFILE.steps[1:]),
        smolfile_with(steps=SMOLFILE.steps[:1]),
        smolfile_with(steps=SMOLFILE.steps[::-1]),
        smolfile_with(steps=(Step(name="new", run="new"), *SMOLFILE.steps)),
        smolfile_with(steps=(*SMOLFILE.steps, Step(name="new", run="new"))),
        smolfile_with(copy=(*SMOLFILE.copy, Copy(source="extra", to="/y"))),
        step_with(0, network=("z.example.com",)),
        step_with(1, inputs=("seed.sql", "src")),
        files_with(seed_sql=(file("seed.sql", "d"),)),
        files_with(src=(FileEntry(path="src", kind="dir"), file("src/b", "b"), file("src/c"))),
        files_with(extra=(file("extra"),)),
        files_with(src=(FileEntry(path="src", kind="dir"), file("src/a"), file("src/b", "9"))),
    ],
)
def test_what_is_said_of_steps_and_files_reaches_as_far_as_they_do(after: KeyInputs) -> None:
    changes = explained(INPUTS, after)
    assert changes
    assert said_to_differ(changes) == first_to_differ(INPUTS, after)


def test_the_network_of_all_is_said_once_and_reaches_the_steps_that_follow_it() -> None:
    own = step_with(0, network=False)
    after = dataclasses.replace(
        own, smolfile=dataclasses.replace(own.smolfile, network=Network(mode="full"))
    )
    changes = explained(own, after)
    assert {change.leaf for change in changes} == {"network"}
    assert said_to_differ(changes) == first_to_differ(own, after) == 2


def said_to_differ(changes: tuple[Change, ...]) -> int | None:
    return min((change.first for change in changes if change.first is not None), default=None)


def first_to_differ(before: KeyInputs, after: KeyInputs) -> int | None:
    old, new = step_chain(before), step_chain(after)
    for link, (was, now) in enumerate(zip(old, new, strict=False)):
        if was != now:
            return link
    return len(old) if len(new) > len(old) else None


def test_a_command_that_changed_is_shown_as_a_small_diff() -> None:
    old = step_with(1, run="one\ntwo\nthree\nfour")
    new = step_with(1, run="one\n-- two\nthree\nfour")
    (change,) = explained(old, new)
    assert change.details == ("@@ -1,3 +1,3 @@", "  one", "- two", "+ -- two", "  three")


def test_the_diff_of_a_long_command_ends() -> None:
    old = step_with(1, run="\n".join(map(str, range(500))))
    new = step_with(1, run="\n".join(map(str, range(1000, 1500))))
    (change,) = explained(old, new)
    assert change.text == "step seed: run changed (500 lines added, 500 removed)"
    assert len(change.details) == 41
    assert change.details[-1] == "(961 more lines)"


def test_a_variable_that_may_be_a_secret_is_named_without_its_value() -> None:
    old, new = (smolfile_with(env=(("API_TOKEN", value),)) for value in ("hunter1", "hunter2"))
    (change,) = explained(old, new)
    assert str(change) == "env API_TOKEN: changed"


def test_the_lines_of_a_file_are_said_where_they_are_known() -> None:
    after = files_with(seed_sql=(file("seed.sql", "d"),))
    asked = []

    def lines(path: str, old: Digest, new: Digest) -> str:
        asked.append((path, old, new))
        return "line 4 changed"

    (change,) = explain(
        Side(tree=build_key_tree(INPUTS)), Side(tree=build_key_tree(after)), lines=lines
    )
    assert str(change).endswith(" (line 4 changed)")
    assert asked == [("seed.sql", digest("c"), digest("d"))]


def debian(**packages: str) -> BaseInfo:
    return BaseInfo(kind="debian", reference="bookworm", digest=digest("1"), packages=packages)


def image(reference: str) -> BaseInfo:
    return BaseInfo(kind="image", reference=reference, digest=digest("1"))


DIGESTS = f"sha256:{'1' * 12}{ELLIPSIS} -> {'9' * 12}{ELLIPSIS}"


@pytest.mark.parametrize(
    ("old", "new", "text", "details"),
    [
        (
            debian(libc6="2.36-9+deb12u7", a="1", gone="1", down="2"),
            debian(libc6="2.36-9+deb12u8", a="1", come="3", down="1~rc1"),
            "base debian bookworm: 1 package newer, 1 older, 1 added, 1 removed",
            (
                "+ come 3",
                "down 2 -> 1~rc1",
                "- gone 1",
                "libc6 2.36-9+deb12u7 -> 2.36-9+deb12u8",
            ),
        ),
        (
            debian(a="1", b="1", c="1"),
            debian(a="2", b="2", c="10"),
            "base debian bookworm: 3 packages newer",
            ("a 1 -> 2", "b 1 -> 2", "c 1 -> 10"),
        ),
        (debian(a="1"), debian(a="1"), f"base debian bookworm: {DIGESTS}", ()),
        (
            image("r.example.com/x:1"),
            image("r.example.com/x:1"),
            f"base r.example.com/x:1: {DIGESTS}",
            (),
        ),
        (
            debian(a="1"),
            image("r.example.com/x:1"),
            f"base: debian bookworm -> r.example.com/x:1 ({DIGESTS})",
            (),
        ),
        (None, debian(a="1"), f"base: {DIGESTS}", ()),
    ],
)
def test_what_is_said_of_the_base(
    old: BaseInfo | None, new: BaseInfo | None, text: str, details: tuple[str, ...]
) -> None:
    after = dataclasses.replace(INPUTS, base=digest("9"))
    (change,) = explain(
        Side(tree=build_key_tree(INPUTS), base=old), Side(tree=build_key_tree(after), base=new)
    )
    assert (change.text, change.details, change.first) == (text, details, 0)


def test_kernel_and_agent_are_said_as_versions_where_they_are_known() -> None:
    after = dataclasses.replace(INPUTS, kernel=digest("9"), agent=digest("9"))
    changes = explain(
        Side(tree=build_key_tree(INPUTS), kernel="6.1.1-1", builder="0.1.0"),
        Side(tree=build_key_tree(after), kernel="6.1.2-1", builder="0.2.0"),
    )
    assert [str(change) for change in changes] == [
        "kernel: 6.1.1-1 -> 6.1.2-1",
        "agent of smolbuild: 0.1.0 -> 0.2.0",
    ]


# The tree as JSON


@given(st.sampled_from(FIELDS))
def test_a_tree_survives_the_round_trip(field: tuple[str, str]) -> None:
    tree = build_key_tree(changed(*field, OTHER[field[0]][field[1]])[1])
    again = tree_from_json(json.loads(json.dumps(tree.to_json())))
    assert provenance_key(again) == provenance_key(tree)
    assert explain(Side(tree=tree), Side(tree=again)) == ()
    assert list(again.leaves) == list(tree.leaves)


TREE = json.dumps(KeyTree(leaves=build_key_tree(INPUTS).leaves).to_json())
NAME = '{"name": "base"'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"format": 1, "leaves"', '"format": 2, "leaves"'),
        ('"format": 1, "leaves"', '"format": true, "leaves"'),
        ('"format": 1, "leaves"', '"more": 1, "format": 1, "leaves"'),
        (NAME, '{"name": "kernel"'),
        (NAME, '{"name": 1'),
        (NAME, '{"more": 1, "name": "base"'),
        ("sha256:1111", "sha256:1112"),
        ('"memory": 512', '"memory": 513'),
        ('"memory": 512', '"memory": 512.0'),
        ('"memory": 512', '"memory": "512"'),
    ],
)
def test_a_tampered_tree_is_refused(old: str, new: str) -> None:
    assert old in TREE
    with pytest.raises(VerificationError, match="key tree"):
        tree_from_json(json.loads(TREE.replace(old, new, 1)))


@given(st.recursive(st.none() | st.integers() | st.text(max_size=3), st.lists))
def test_junk_is_not_a_tree(value: object) -> None:
    with pytest.raises(VerificationError):
        tree_from_json(value)
    with pytest.raises(VerificationError):
        tree_from_json({"format": 1, "leaves": [value]})
