"""What a watched build notices: real edits of real files, and a clock that makes them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from smolbuild.build.watch import Watched, await_change, look, watched_of

SMOLFILE = """\
image = "./rootfs/"
[smolbuild]
name = "t/watched"
copy = [{ from = "src", to = "/src" }]
[[smolbuild.step]]
name = "one"
run = "true"
inputs = ["seed.sql"]
copy = [{ from = "late.txt", to = "/" }]
"""


@pytest.fixture
def project(tmp_path) -> Path:
    for name in ("rootfs/bin", "src/deep", "src/out"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("rootfs/bin/sh", "src/a.py", "src/deep/b.py", "seed.sql", "late.txt", "other"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".smolbuildignore").write_text("src/out/\n")
    (tmp_path / "Smolfile").write_text(SMOLFILE)
    return tmp_path


@pytest.fixture
def watched(project) -> Watched:
    return watched_of(project / "Smolfile", {}, None)


class Sleeper:
    """A clock whose n-th sleep does the n-th of some edits; after the last, time just passes."""

    def __init__(self, *edits: Callable[[], object]) -> None:
        self.edits = list(edits)
        self.slept: list[float] = []
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert len(self.slept) < 200, "it waits for ever"
        self.slept.append(seconds)
        self.time += seconds
        if self.edits:
            self.edits.pop(0)()


def nothing() -> None:
    pass


@pytest.mark.parametrize(
    "name",
    [
        "Smolfile",
        "smolbuild.toml",
        "Smolfile.lock",
        ".smolbuildignore",
        "src/a.py",
        "src/deep/b.py",
        "src/new.py",
        "src/deep/new.py",
        "seed.sql",
        "late.txt",
        "rootfs/bin/sh",
        "rootfs/new",
    ],
)
def test_every_declared_input_counts(project, watched, name):
    def edit():
        with (project / name).open("a") as stream:
            stream.write("more")

    assert await_change(watched, look(watched), Sleeper(nothing, edit)) == (str(project / name),)


@pytest.mark.parametrize("name", ["other", "src/out/built", ".git/index", "Smolfile.bak"])
def test_what_is_not_declared_does_not(project, watched, name):
    seen = look(watched)
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text("x")
    assert look(watched) == seen


def test_removal_mode_and_same_size_edits_count(project, watched):
    seen = look(watched)
    path = project / "src" / "a.py"
    status = path.stat()
    path.write_text("SRC/A.PY"[: status.st_size])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert look(watched) != seen
    seen = look(watched)
    path.chmod(0o755)
    assert look(watched) != seen
    seen = look(watched)
    path.unlink()
    assert await_change(watched, seen, Sleeper()) == (str(path),)


def test_a_new_empty_directory_counts(project, watched):
    seen = look(watched)
    (project / "src" / "empty").mkdir()
    assert await_change(watched, seen, Sleeper()) == (str(project / "src" / "empty"),)


def test_a_link_is_watched_and_not_followed(project, watched, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (project / "src" / "link").symlink_to(elsewhere)
    seen = look(watched)
    (elsewhere / "x").write_text("x")
    assert look(watched) == seen
    (project / "src" / "link").unlink()
    (project / "src" / "link").symlink_to("/")
    assert look(watched) != seen


def test_edits_that_follow_each_other_are_one_change(project, watched):
    seen = look(watched)
    edits = [lambda n=n: (project / "src" / f"{n}.py").write_text(str(n)) for n in range(4)]
    clock = Sleeper(*edits)
    changed = await_change(watched, seen, clock)
    assert [Path(path).name for path in changed] == ["0.py", "1.py", "2.py", "3.py"]
    assert clock.slept == [0.3] * 5


def test_what_changes_all_the_time_is_built_all_the_same(project, watched):
    edits = [lambda n=n: (project / "seed.sql").write_text("x" * n) for n in range(1000)]
    clock = Sleeper(*edits)
    assert await_change(watched, look(watched), clock) == (str(project / "seed.sql"),)
    assert 10 <= clock.time < 11


def test_an_edit_that_is_taken_back_is_none(project, watched):
    path = project / "src" / "new.py"
    clock = Sleeper(
        lambda: path.write_text("x"), path.unlink, nothing, lambda: path.write_text("y")
    )
    assert await_change(watched, look(watched), clock) == (str(path),)


def test_while_the_smolfile_is_wrong_the_last_inputs_are_watched(project, watched):
    (project / "Smolfile").write_text("image = [")
    assert watched_of(project / "Smolfile", {}, watched) == watched
    first = watched_of(project / "Smolfile", {}, None)
    seen = look(first)
    assert list(seen) == [str(project / name) for name in ("Smolfile", ".smolbuildignore")]
    (project / "Smolfile").write_text(SMOLFILE.replace("src", "other"))
    assert watched_of(project / "Smolfile", {}, watched).sources[0] == "other"


def test_inputs_that_are_not_there_yet_are_watched(project):
    text = SMOLFILE.replace("seed.sql", "missing/seed.sql").replace("./rootfs/", "./later.tar")
    (project / "Smolfile").write_text(text)
    watched = watched_of(project / "Smolfile", {}, None)
    seen = look(watched)
    (project / "missing").mkdir()
    assert look(watched) == seen
    (project / "missing" / "seed.sql").write_text("x")
    (project / "later.tar").write_text("x")
    assert set(look(watched)) - set(seen) == {
        str(project / "missing" / "seed.sql"),
        str(project / "later.tar"),
    }


def test_a_dockerfile_its_context_and_certificates_are_inputs(project):
    (project / "Smolfile").write_text(
        '[network]\nca_files = ["ca.pem"]\n[smolbuild]\nname = "t/docker"\n'
        '[smolbuild.base]\ndockerfile = "docker/Dockerfile"\n'
    )
    watched = watched_of(project / "Smolfile", {}, None)
    for name in ("docker/Dockerfile", "other", "rootfs/bin/sh", "ca.pem", "poetry.lock"):
        seen = look(watched)
        (project / name).parent.mkdir(exist_ok=True)
        with (project / name).open("a") as stream:
            stream.write("more")
        assert str(project / name) in await_change(watched, seen, Sleeper())
    seen = look(watched)
    (project / ".git").mkdir()
    (project / ".git" / "index").write_text("x")
    assert look(watched) == seen


def test_the_pause_between_looks_grows_with_their_cost(project, watched):
    clock = Sleeper(nothing, lambda: (project / "seed.sql").write_text("now"))
    clock.monotonic = lambda: clock.time + next(costs)  # type: ignore[method-assign]
    costs = iter(n * 0.5 for n in range(100))
    await_change(watched, look(watched), clock)
    assert clock.slept[0] == 5.0
