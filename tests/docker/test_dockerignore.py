"""What is sent to an engine: our reading of .dockerignore against the docker package's."""

import os
from pathlib import Path

import pytest
from docker.utils.build import exclude_paths
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from smolbuild.core.errors import BuildError, UsageError
from smolbuild.model.smolfile import Dockerfile, Smolfile
from smolbuild.source.docker_context import collect_context
from smolbuild.source.dockerignore import parse_dockerignore

NAMES = ("a", "b", "foo", "x.py", "x.pyc", "[odd]")
PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map("/".join)
PATTERNS = st.builds(
    lambda sign, parts, tail: sign + "/".join(parts) + tail,
    st.sampled_from(["", "", "!"]),
    st.lists(
        st.sampled_from([*NAMES[:-1], "*", "**", "*.py*", "?", "f*o", "[a-f]oo", "x.p?c"]),
        min_size=1, max_size=4,
    ),
    st.sampled_from(["", "", "/"]),
)  # fmt: skip


def context_of(directory: Path, **facts: object):
    base = Dockerfile(**{"dockerfile": "Dockerfile", **facts})
    return collect_context(Smolfile(path=directory / "Smolfile", base=base), base)


def fill(directory: Path, paths: set[str]) -> None:
    for path in sorted(paths):
        target = directory / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.write_text(path)
        except (NotADirectoryError, FileExistsError):
            continue
    (directory / "Dockerfile").write_text("FROM scratch\n")


@given(st.sets(PATHS, max_size=12), st.lists(PATTERNS, max_size=5))
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example({"a/b/x.py", "a/foo"}, ["*", "!a/b"])
@example({"a/b/x.py", "a/foo"}, ["a", "!a/b/x.py"])
@example({"a/a"}, ["a", "!*/a"])
@example({"foo/a", "foo/b"}, ["foo/*", "!foo/b"])
def test_the_docker_package_sends_the_same_files(tmp_path_factory, paths, patterns):
    # How `**` meets directories above a file changed in Docker (moby/patternmatcher: a match of the
    # directory is one of all below it), and the package has the older way.
    assume(not any("**" in p for p in patterns) or not any(p.startswith("!") for p in patterns))
    directory = tmp_path_factory.mktemp("context")
    fill(directory, paths)
    (directory / ".dockerignore").write_text("\n".join(patterns) + "\n")
    sent = exclude_paths(os.fspath(directory), patterns, dockerfile="Dockerfile")
    theirs = {path for path in sent if not (directory / path).is_dir()}
    ours = {entry.path for entry in context_of(directory).files if entry.kind == "file"}
    assert ours == theirs | {"Dockerfile", ".dockerignore"}


@pytest.mark.parametrize(
    ("lines", "path", "out"),
    [
        (["# comment", "", "a"], "a", True),
        (["#a"], "#a", False),
        (["/a/b/"], "a/b/c", True),
        (["a/../b"], "b", True),
        ([r"a\*"], "a*", True),
        ([r"a\*"], "ab", False),
        (["**"], "a/b", True),
        (["**/foo"], "foo", True),
        (["**/foo"], "a/b/foo/c", True),
        (["*/*/x"], "a/b/x", True),
        (["**/x.py", "!b/**"], "b/foo/x.py", False),
        (["**/x.py", "!b/**"], "a/x.py", True),
        (["x", "!**/x"], "x/a", False),
        (["*.md", "!README.md", "*E.md"], "README.md", True),
        (["[!a]x"], "[!a]x", False),
        (["a["], "a[", True),
    ],
)
def test_rules(lines, path, out):
    assert parse_dockerignore(lines).leaves_out(path) is out


def test_directories_of_what_is_sent_are_sent_and_no_others(tmp_path):
    fill(tmp_path, {"a/b/keep", "a/c/drop", "d/drop"})
    (tmp_path / "empty").mkdir()
    (tmp_path / ".dockerignore").write_text("a\nd\n!a/b/keep\n")
    paths = [entry.path for entry in context_of(tmp_path).files]
    assert paths == [".dockerignore", "Dockerfile", "a", "a/b", "a/b/keep", "empty"]


def test_what_is_ours_is_not_sent_unless_asked_for(tmp_path):
    fill(tmp_path, {".git/index", "Smolfile", "Smolfile.lock", "smolbuild.toml", "a"})
    assert [entry.path for entry in context_of(tmp_path).files] == ["Dockerfile", "a"]
    (tmp_path / ".dockerignore").write_text("!.git\n!Smolfile\n")
    paths = {entry.path for entry in context_of(tmp_path).files}
    assert paths == {".dockerignore", ".git", ".git/index", "Dockerfile", "Smolfile", "a"}


def test_the_digest_is_of_what_counts(tmp_path):
    fill(tmp_path, {"a/b", "c"})
    first = context_of(tmp_path)
    (tmp_path / "a/b").chmod(0o600)
    os.utime(tmp_path / "c", (1, 1))
    (tmp_path / "a").chmod(0o700)
    (tmp_path / "Smolfile").write_text("cpus = 1\n")
    again = context_of(tmp_path)
    assert again.digest == first.digest
    assert b"".join(again.tar()) == b"".join(first.tar())
    changes = [
        context_of(tmp_path, args=(("A", "b"),)).digest,
        context_of(tmp_path, target="x").digest,
    ]
    (tmp_path / "a/b").chmod(0o700)
    changes.append(context_of(tmp_path).digest)
    (tmp_path / "a/b").write_text("other")
    changes.append(context_of(tmp_path).digest)
    (tmp_path / "new").mkdir()
    changes.append(context_of(tmp_path).digest)
    (tmp_path / "new").rmdir()
    (tmp_path / "Dockerfile").write_text("FROM other\n")
    changes.append(context_of(tmp_path).digest)
    assert len({first.digest, *changes}) == len(changes) + 1


def test_what_cannot_be_sent(tmp_path):
    fill(tmp_path, set())
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BuildError, match="'pipe', but it is not a file") as caught:
        context_of(tmp_path)
    assert ".dockerignore" in caught.value.hint
    (tmp_path / ".dockerignore").write_text("pipe\n[z-a]\n")
    with pytest.raises(UsageError, match=r"\[z-a\]"):
        context_of(tmp_path)
    (tmp_path / ".dockerignore").write_text("pipe\n")
    context_of(tmp_path)
