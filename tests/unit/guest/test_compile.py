"""The agent's compilation: cached, reproducible, and identified by its source."""

from pathlib import Path

from smolbuild.core.digest import parse_digest
from smolbuild.guest import agent_source
from smolbuild.guest import compile as compilation


def test_compiled_once_and_reproducible(tmp_path: Path) -> None:
    first = compilation.build_agent(tmp_path / "a")
    made = first.stat().st_mtime_ns
    assert compilation.build_agent(tmp_path / "a") == first
    assert first.stat().st_mtime_ns == made
    second = compilation.build_agent(tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    assert b"/usr/lib/ld" not in first.read_bytes()  # static
    assert str(tmp_path).encode() not in first.read_bytes()
    assert [p.name for p in (tmp_path / "a" / "agent").iterdir() if p.name != ".lock"] == [
        first.name
    ]


def test_the_digest_is_of_the_source() -> None:
    assert parse_digest(agent_source.agent_digest()) == agent_source.agent_digest()
    names = [path.name for path in agent_source.agent_sources()]
    assert names == sorted(names)
    assert {"agent.h", "main.c"} <= set(names)
