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
from smolbuild.model.contract import Contract
from smolbuild.model.declared import DeclaredFiles, FileEntry
from smolbuild.model.key import EXCLUDED, KeyInputs, build_key_tree, provenance_key, step_chain
from smolbuild.model.keytree import KeyTree, diff_trees, tree_from_json
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
KNOWN_KEY = "sha256:d4c23f448a7948f93ebb0c1f75d367e8da10532e6dc8f813ae7e90e5e369d2c8"
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


def texts(inputs: KeyInputs) -> list[str]:
    return [str(change) for change in diff_trees(build_key_tree(INPUTS), build_key_tree(inputs))]


# Every field is either in the key or excluded with a reason

OTHER: Mapping[str, Mapping[str, Any]] = {
    "Smolfile": {
        "path": Path("/elsewhere/Smolfile"),
        "image": "y",
        "entrypoint": ("e",),
        "cmd": ("c",),
        "env": (("PORT", "81"),),
        "imported_env": ("PORT",),
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
FIELDS += [("KeyInputs", name) for name in ("base", "kernel", "initramfs", "agent")]


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
        (smolfile_with(env=(("PORT", "81"), ("MODE", "a"))), ["env: PORT 80 -> 81"]),
        (smolfile_with(env=(("PORT", "80"),)), ["env: MODE a -> none"]),
        (step_with(1, run="x" * 90), ["step seed: run changed"]),
        (step_with(1, run="a\nb"), ["step seed: run changed"]),
        (step_with(0, user="u"), ["step init-1: user none -> u"]),
        (step_with(1, secrets=("TOKEN", "B")), ["step seed: secrets [TOKEN] -> [B, TOKEN]"]),
        (
            files_with(seed_sql=(file("seed.sql", "d"),)),
            ["file seed.sql: content sha256:cccccccccccc -> sha256:dddddddddddd"],
        ),
        (
            files_with(seed_sql=(file("seed.sql", "c", executable=True),)),
            ["file seed.sql: executable false -> true"],
        ),
        (
            files_with(src=(FileEntry(path="src", kind="dir"), file("src/b", "b"), file("src/c"))),
            ["file src/c: added", "file src/a: removed"],
        ),
        (smolfile_with(services=()), ["service api: removed"]),
        (
            smolfile_with(steps=SMOLFILE.steps[::-1]),
            ["order: step init-1, step seed -> step seed, step init-1"],
        ),
        (smolfile_with(health=None), ["health: changed"]),
        (
            dataclasses.replace(INPUTS, base=digest("9")),
            ["base: sha256:111111111111 -> sha256:999999999999"],
        ),
        (
            dataclasses.replace(INPUTS, contract=dataclasses.replace(CONTRACT, accelerator="kvm")),
            ["accelerator: tcg -> kvm"],
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
    assert (diff_trees(first, second) == ()) == same


# The tree as JSON


@given(st.sampled_from(FIELDS))
def test_a_tree_survives_the_round_trip(field: tuple[str, str]) -> None:
    tree = build_key_tree(changed(*field, OTHER[field[0]][field[1]])[1])
    again = tree_from_json(json.loads(json.dumps(tree.to_json())))
    assert provenance_key(again) == provenance_key(tree)
    assert diff_trees(tree, again) == ()
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
