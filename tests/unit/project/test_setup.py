"""scripts/setup.sh on systems that it cannot install on."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOLS = ("bash", "cat", "dirname", "env", "find", "id", "mktemp", "rm", "sort", "tail")


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """Give a directory with a shell's everyday tools and nothing that smolbuild needs."""
    for name in TOOLS:
        (tmp_path / name).symlink_to(Path("/usr/bin") / name)
    return tmp_path


def run_setup(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/usr/bin/bash", str(ROOT / "scripts" / "setup.sh"), *arguments],
        env={"PATH": str(path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_apt_it_names_every_program_and_its_package(bare_path: Path):
    ended = run_setup(bare_path, "--dev")
    assert ended.returncode == 2
    for line in (
        "qemu-system-x86_64  (qemu-system-x86)",
        "musl-gcc  (musl-tools)",
        "node  (nodejs)",
    ):
        assert f"setup:   {line}" in ended.stderr.splitlines()


def test_what_only_tests_need_is_not_asked_for_by_the_demo(bare_path: Path):
    assert "nodejs" not in run_setup(bare_path).stderr


def test_without_root_and_sudo_it_names_the_command(bare_path: Path):
    (bare_path / "apt-get").symlink_to("/usr/bin/false")
    (bare_path / "id").unlink()
    (bare_path / "id").write_text("#!/usr/bin/bash\necho 1000\n")
    (bare_path / "id").chmod(0o755)
    ended = run_setup(bare_path)
    assert ended.returncode == 2
    assert "as root, run: apt-get install" in ended.stderr


def test_an_unknown_option_is_refused(bare_path: Path):
    ended = run_setup(bare_path, "--everything")
    assert ended.returncode == 2
    assert "--dev" in ended.stderr


def test_without_root_and_user_namespaces_it_asks_for_what_does_without(bare_path: Path):
    words = (ROOT / "scripts" / "setup.sh").read_text().partition('RUN_NEEDS="')[2]
    for line in words.partition('"')[0].split("\n"):
        program = line.partition(" ")[0]
        if program and not program.startswith("/"):
            (bare_path / program).symlink_to("/usr/bin/true")
    for name, script in (("mmdebstrap", "exit 1"), ("id", "echo 1000")):
        (bare_path / name).unlink()
        (bare_path / name).write_text(f"#!/usr/bin/bash\n{script}\n")
        (bare_path / name).chmod(0o755)
    ended = run_setup(bare_path)
    assert ended.returncode == 2
    assert "setup:   fakechroot  (fakechroot)" in ended.stderr.splitlines()
