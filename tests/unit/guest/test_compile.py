"""The agent's compilation: cached, reproducible, and identified by its source."""

from pathlib import Path

import pytest

from smolbuild.core.digest import parse_digest
from smolbuild.core.errors import HostError
from smolbuild.guest import agent_source
from smolbuild.guest import compile as compilation
from smolbuild.residue import scanner


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


@pytest.mark.parametrize("program", ["agent", "scanner"])
def test_it_compiles_without_a_warning(program: str, tmp_path: Path) -> None:
    # -Wpedantic: what one compiler takes as an extension has another meaning to the next.
    sources = agent_source.agent_sources()
    if program == "scanner":
        sources = (Path(scanner.__file__).with_name("scan.c"),)
    flags = (*compilation.FLAGS, "-Wpedantic", "-Werror")
    compilation.build_program(tmp_path, program, sources, agent_source.agent_digest(), flags)


def test_what_does_not_compile_says_so(tmp_path: Path) -> None:
    source = tmp_path / "broken.c"
    source.write_text("int main(void) { return missing; }\n")
    digest = agent_source.agent_digest()
    with pytest.raises(HostError, match=r"broken\.c:1:.*missing") as raised:
        compilation.build_program(tmp_path, "agent", (source,), digest, compilation.FLAGS)
    assert "musl-tools" in raised.value.hint
