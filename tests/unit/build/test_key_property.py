"""Two states of Smolfile and tree share a key exactly when they are the same state.

A state is drawn as plain data, and what counts of it is said here a second time, independently of
``model.key``; then it is written to a directory in some order, under some umask, with some times,
and its key is taken as a build takes it.
"""

import copy as copy_module
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smolbuild.build.files import collect_files
from smolbuild.core.digest import Digest
from smolbuild.model.contract import Contract
from smolbuild.model.explain import Side, explain
from smolbuild.model.key import KeyInputs, build_key_tree, provenance_key, step_chain
from smolbuild.model.parse import parse_smolfile

State = dict[str, Any]

CONTRACT = Contract(
    engine="qemu",
    engine_version="7.2",
    machine_type="microvm",
    cpu_model="max",
    accelerator="tcg",
    architecture="x86_64",
)
SERVICE_KEYS = ("ready", "user", "workdir")
SOURCES = ("src", "a.txt", "link", "src/sub")
words = st.sampled_from(["x", "y", "é \" \\ '", "two\nlines"])
names = st.sampled_from(["A", "B", "C"])
environments = st.dictionaries(names, words, max_size=2)
contents = st.sampled_from([b"", b"1", b"2", b"\0\xff"])
files = st.fixed_dictionaries(
    {
        "src/f": st.tuples(contents, st.booleans()),
        "src/sub/g": st.tuples(contents, st.booleans()),
        "a.txt": st.tuples(contents, st.booleans()),
        "nobody declares it": st.tuples(contents, st.booleans()),
    },
    optional={"src/more": st.tuples(contents, st.booleans())},
)
copies = st.lists(
    st.fixed_dictionaries(
        {"from": st.sampled_from(SOURCES), "to": st.sampled_from(["/p", "/q/"])},
        optional={"mode": st.sampled_from(["0600", "0755"]), "owner": st.just("7:7")},
    ),
    max_size=2,
)
steps = st.lists(
    st.fixed_dictionaries(
        {"name": names, "run": words, "inputs": st.lists(st.sampled_from(SOURCES), max_size=2)},
        optional={"env": environments, "user": words.filter(str.isalnum), "copy": copies},
    ),
    max_size=3,
    unique_by=lambda step: step["name"],
)
services = st.lists(
    st.fixed_dictionaries(
        {"name": names, "run": words},
        optional={"env": environments, "ready": st.sampled_from([{"port": 80}, {"port": 81}])},
    ),
    max_size=2,
    unique_by=lambda service: service["name"],
)
states = st.fixed_dictionaries(
    {
        "files": files,
        "target": st.sampled_from(["a.txt", "src"]),
        "env": environments,
        "memory": st.sampled_from([256, 512]),
        "hosts": st.lists(st.sampled_from(["a.example.com", "b.example.com"]), max_size=2),
        "copy": copies,
        "steps": steps,
        "services": services,
        "health": st.none() | st.sampled_from(["500ms", "1s"]),
    }
)


def canonical(state: State) -> str:
    """Return what counts of a state, as one text."""

    def entry(path: str) -> list[str]:
        if path == "link":
            return ["link", state["target"]]
        if path in state["files"]:
            content, executable = state["files"][path]
            return ["file", content.hex(), str(executable)]
        return ["dir"]

    def below(source: str) -> dict[str, list[str]]:
        paths = {*state["files"], "src", "src/sub", "link"}
        return {p: entry(p) for p in paths if p == source or p.startswith(f"{source}/")}

    def copy(value: dict[str, str]) -> list[Any]:
        return [value["from"], value["to"], value.get("mode"), value.get("owner")]

    steps = [
        [
            step["name"],
            step["run"],
            step.get("env", {}),
            step.get("user"),
            sorted(set(step["inputs"])),
            [copy(each) for each in step.get("copy", [])],
            # Where nobody reaches anything, one more step that does not is nothing new.
            [step.get("network") is False and state["hosts"] != []],
            [step.get("workdir"), step.get("secrets")],
        ]
        for step in state["steps"]
    ]
    sources = {each["from"] for each in state["copy"]}
    for step in state["steps"]:
        sources |= {*step["inputs"], *(each["from"] for each in step.get("copy", []))}
    declared: dict[str, list[str]] = {}
    for source in sources:
        declared |= below(source)
    said = {
        "files": declared,
        "env": state["env"],
        "memory": state["memory"],
        "hosts": sorted(set(state["hosts"])),
        "copy": [copy(each) for each in state["copy"]],
        "steps": steps,
        "services": [
            [each["name"], each["run"], each.get("env", {}), *map(each.get, SERVICE_KEYS)]
            for each in state["services"]
        ],
        "health": state["health"],
    }
    return json.dumps(said, sort_keys=True)


def toml(value: Any) -> str:
    """Return a value as TOML; a JSON string is a TOML string."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def write(state: State, directory: Path, chance: random.Random) -> None:
    """Write a state to ``directory``: every order, mode and time that does not count by chance."""

    def shuffled(values: Any) -> list[Any]:
        listed = list(values)
        chance.shuffle(listed)
        return listed

    def env(values: dict[str, str]) -> list[str]:
        return [f"{name}={value}" for name, value in shuffled(values.items())]

    lines = shuffled(
        [
            'image = "x"',
            f"memory = {state['memory']}",
            f"env = {toml(env(state['env']))}",
        ]
    )
    if state["hosts"]:
        hosts = shuffled([*state["hosts"], *state["hosts"][: chance.randrange(2)]])
        lines += ["[network]", f"allow_hosts = {toml(hosts)}"]
    if state["health"] is not None:
        lines += ["[health]", f"interval = {toml(state['health'])}", 'exec = ["x"]']
    lines += ["[smolbuild]", f"copy = {toml([dict(shuffled(c.items())) for c in state['copy']])}"]
    for kind in ("step", "service"):
        for item in state[f"{kind}s"]:
            lines.append(f"[[smolbuild.{kind}]]")
            for key, value in shuffled(item.items()):
                said = env(value) if key == "env" else value
                if key == "inputs":
                    said = shuffled(value)
                lines.append(f"{key} = {toml(said)}")
    before = os.umask(chance.choice([0o000, 0o022, 0o077]))
    try:
        for path in shuffled([*state["files"], "link"]):
            full = directory / path
            full.parent.mkdir(parents=True, exist_ok=True)
            if path == "link":
                full.symlink_to(state["target"])
                continue
            content, executable = state["files"][path]
            full.write_bytes(content)
            if executable:
                full.chmod(full.stat().st_mode | 0o100)
            os.utime(full, (0, chance.randrange(2**31)))
        (directory / "Smolfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    finally:
        os.umask(before)


def inputs_of(directory: Path) -> KeyInputs:
    smolfile = parse_smolfile(directory / "Smolfile", environment={})
    digest = Digest("sha256:" + "1" * 64)
    return KeyInputs(
        base=digest,
        kernel=digest,
        initramfs=digest,
        agent=digest,
        contract=CONTRACT,
        smolfile=smolfile,
        files=collect_files(directory, smolfile),
    )


def written(state: State, seed: int) -> KeyInputs:
    with tempfile.TemporaryDirectory(prefix=f"state-{seed}-") as directory:
        place = Path(directory) / ("deeper" * (seed % 3))
        place.mkdir(exist_ok=True)
        write(state, place, random.Random(seed))
        return inputs_of(place)


def edits(state: State) -> list[tuple[dict[str, Any], str, Any]]:
    """Return small changes of ``state``, each a mapping, a key of it and the value to put there."""
    found: list[tuple[dict[str, Any], str, Any]] = [
        (state, "target", "src"),
        (state, "memory", 1024),
        (state, "health", "500ms"),
        (state["env"], "A", "other"),
        (state, "hosts", ["a.example.com"]),
        (state, "steps", state["steps"][::-1]),
        (state, "copy", state["copy"][::-1]),
        (state, "services", state["services"][::-1]),
    ]
    for path, (content, executable) in state["files"].items():
        found += [(state["files"], path, (content, not executable))]
        found += [(state["files"], path, (content + b"+", executable))]
    for each in (*state["copy"], *(c for step in state["steps"] for c in step.get("copy", []))):
        found += [(each, "owner", "8"), (each, "mode", "0640"), (each, "to", "/elsewhere")]
        found += [(each, "from", "src")]
    for step in state["steps"]:
        found += [(step, "user", "other"), (step, "run", "other"), (step, "name", "D")]
        found += [(step, "inputs", ["src"]), (step, "env", {"A": "x"}), (step, "inputs", [])]
        found += [(step, "network", False), (step, "workdir", "/w"), (step, "secrets", ["S"])]
    for service in state["services"]:
        found += [(service, "ready", {"port": 99}), (service, "run", "other")]
        found += [(service, "user", "other"), (service, "workdir", "/w")]
    return found


@st.composite
def pairs(draw: st.DrawFn) -> tuple[State, State]:
    """Draw two states: the same, one with a small change, or any two."""
    one = draw(states)
    if draw(st.integers(0, 9)) == 0:
        return one, draw(states)
    two = copy_module.deepcopy(one)
    for _ in range(draw(st.integers(0, 2))):
        mapping, key, value = draw(st.sampled_from(edits(two)))
        mapping[key] = value
    return one, two


@given(pairs(), st.integers(0, 99), st.integers(0, 99))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_two_states_share_a_key_exactly_when_they_are_the_same(
    pair: tuple[State, State], seed: int, other_seed: int
) -> None:
    one, two = written(pair[0], seed), written(pair[1], other_seed)
    same = canonical(pair[0]) == canonical(pair[1])
    trees = build_key_tree(one), build_key_tree(two)
    keys = [provenance_key(tree) for tree in trees]
    assert (keys[0] == keys[1]) == same
    if same:
        assert step_chain(one) == step_chain(two)
    changes = explain(Side(tree=trees[0]), Side(tree=trees[1]))
    assert bool(changes) != same
    assert all(change.text.isprintable() for change in changes)
    # What runs again is explained: no later than the first link that differs.
    links = list(zip(step_chain(one), step_chain(two), strict=False))
    differing = next((n for n, (was, now) in enumerate(links) if was != now), None)
    if differing is not None:
        assert min(change.first for change in changes if change.first is not None) <= differing


RICH: State = {
    "files": dict.fromkeys(("src/f", "src/sub/g", "a.txt", "undeclared"), (b"1", False)),
    "target": "a.txt",
    "env": {"A": "x"},
    "memory": 256,
    "hosts": ["b.example.com"],
    "copy": [{"from": "src/sub", "to": "/p"}, {"from": "link", "to": "/l"}],
    "steps": [
        {"name": "A", "run": "x", "inputs": ["a.txt"], "copy": [{"from": "src/sub", "to": "/s"}]},
        {"name": "B", "run": "y", "inputs": ["src"]},
    ],
    "services": [{"name": "A", "run": "x"}, {"name": "B", "run": "y"}],
    "health": "1s",
}


@pytest.mark.parametrize("number", range(len(edits(RICH))))
def test_each_small_change_counts_exactly_when_it_is_one(number: int) -> None:
    state = copy_module.deepcopy(RICH)
    mapping, key, value = edits(state)[number]
    mapping[key] = value
    counts = canonical(state) != canonical(RICH)
    keys = {provenance_key(build_key_tree(written(each, 1))) for each in (RICH, state)}
    assert len(keys) == 1 + counts


PROGRAM = """\
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_key_property import inputs_of
from smolbuild.model.key import build_key_tree, provenance_key
print(provenance_key(build_key_tree(inputs_of(Path(sys.argv[2])))))
"""


def test_neither_locale_nor_path_nor_directory_order_nor_hash_seed_matters(tmp_path: Path) -> None:
    state = {
        "files": dict.fromkeys(("a.txt", "src/f", "src/sub/g", "src/é", "B"), (b"1", False)),
        "target": "src",
        "env": {"A": "\xe9", "B": "2"},
        "memory": 256,
        "hosts": ["b.example.com", "a.example.com"],
        "copy": [{"from": "src", "to": "/p"}, {"from": "link", "to": "/l"}],
        "steps": [{"name": "A", "run": "x", "inputs": ["src/sub", "a.txt"]}],
        "services": [],
        "health": "1s",
    }
    keys = set()
    for number, locale in enumerate(("C", "C.UTF-8", "POSIX")):
        place = tmp_path / ("x" * number) / "checkout"
        place.mkdir(parents=True, exist_ok=True)
        write(state, place, random.Random(number))
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(place)],
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
                "LC_ALL": locale,
                "PYTHONHASHSEED": str(number),
                "TZ": ("UTC", "Asia/Tokyo", "America/Lima")[number],
            },
            cwd=("/", tmp_path, place)[number],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        keys.add(done.stdout)
        shutil.rmtree(place)
    assert len(keys) == 1
