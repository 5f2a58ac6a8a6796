"""Parts of scripts/ and bench/ that decide something."""

import importlib.util
import socket
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answers(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        probe.settimeout(5)
        return probe.connect_ex((host, int(port))) == 0


def test_the_demos_registry_ends_with_its_block_also_on_an_error():
    demo = load("scripts/demo.py")
    seen = []

    def fail_inside() -> None:
        with demo.registry() as address:
            seen.append((address, answers(address)))
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        fail_inside()
    [(address, answered)] = seen
    assert answered
    assert not answers(address)


def test_a_demo_command_that_fails_ends_the_demo_with_its_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    demo = load("scripts/demo.py")
    monkeypatch.setattr(demo, "SMOLBUILD", Path(sys.executable))
    failing = ("-c", "import sys; sys.exit(4)")
    with pytest.raises(SystemExit) as ended:
        demo.smolbuild(tmp_path, *failing)
    assert ended.value.code == 4
    assert demo.smolbuild(tmp_path, *failing, may_fail=True) is None


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        (range(1, 21), 0.95, 19),
        (range(1, 101), 0.95, 95),
        ([7, 3, 5], 0.5, 5),
        ([7], 0.95, 7),
        ([1, 2], 0.0, 1),
        ([1, 2], 1.0, 2),
    ],
)
def test_percentile_is_the_nearest_rank(values, share: float, expected: int):
    assert load("bench/measure.py").percentile(list(values), share) == expected
