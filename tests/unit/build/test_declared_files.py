"""Declared files: what is found, what changes the key, and the archive that goes into the guest."""

import dataclasses
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from smolbuild.build.files import collect_files
from smolbuild.build.ignore import parse_ignore
from smolbuild.build.tarstream import named_owners, tar_stream
from smolbuild.core.digest import Digest, digest_bytes, digest_chunks
from smolbuild.core.errors import BuildError, SmolfileError
from smolbuild.model.contract import Contract
from smolbuild.model.declared import DeclaredFiles
from smolbuild.model.key import KeyInputs, build_key_tree, provenance_key
from smolbuild.model.parse import parse_smolfile
from smolbuild.model.smolfile import Copy, Smolfile

CONTRACT = Contract(
    engine="qemu",
    engine_version="7.2",
    machine_type="microvm",
    cpu_model="max",
    accelerator="tcg",
    architecture="x86_64",
)
ZERO = Digest("sha256:" + "0" * 64)
TEXT = """\
image = "x"
[smolbuild]
copy = [{ from = "src", to = "/app/src" }, { from = "one.txt", to = "/etc/" }]
[[smolbuild.step]]
run = "seed"
inputs = ["seed.sql"]
"""


def write(root: Path, files: dict[str, bytes], text: str = TEXT) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (root / "Smolfile").write_text(text)
    return root


@pytest.fixture
def context(tmp_path: Path) -> Path:
    files = {"src/a.py": b"a", "src/deep/b.py": b"b", "one.txt": b"1", "seed.sql": b"s"}
    return write(tmp_path / "checkout", files | {"unrelated": b"u"})


def read(context: Path) -> Smolfile:
    return parse_smolfile(context / "Smolfile", environment={})


def collect(context: Path) -> DeclaredFiles:
    return collect_files(context, read(context))


def key_of(context: Path) -> Digest:
    inputs = KeyInputs(
        base=ZERO,
        kernel=ZERO,
        initramfs=ZERO,
        agent=ZERO,
        contract=CONTRACT,
        smolfile=read(context),
        files=collect(context),
    )
    return provenance_key(build_key_tree(inputs))


def problems(context: Path) -> list[str]:
    with pytest.raises(SmolfileError) as caught:
        collect(context)
    return [str(problem).removeprefix(f"{context}/") for problem in caught.value.problems]


def unpack(chunks: list[bytes]) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
        return {member.name: member for member in archive.getmembers()}


def archive(files: DeclaredFiles, *copies: Copy) -> dict[str, tarfile.TarInfo]:
    return unpack(list(tar_stream(files, copies)))


# Collecting


def test_what_is_found(context: Path) -> None:
    (context / "src/link").symlink_to("deep/../a.py")
    (context / "src/empty").mkdir()
    (context / "src/a.py").chmod(0o700)
    files = collect(context)
    found = [(entry.path, entry.kind, entry.executable) for entry in files.under("src")]
    assert found == [
        ("src", "dir", False),
        ("src/a.py", "file", True),
        ("src/deep", "dir", False),
        ("src/deep/b.py", "file", False),
        ("src/empty", "dir", False),
        ("src/link", "symlink", False),
    ]
    link = files.under("src")[-1]
    assert link.target == "deep/../a.py", "as it is, not tidied up"
    assert files.under("seed.sql")[0].digest == digest_bytes(b"s")
    assert [entry.path for entry in files.entries()] == sorted(
        [path for path, _, _ in found] + ["one.txt", "seed.sql"]
    )


def test_every_missing_or_special_source_is_named_with_its_line(context: Path) -> None:
    (context / "one.txt").unlink()
    (context / "seed.sql").unlink()
    os.mkfifo(context / "src/pipe")
    assert problems(context) == [
        (
            "Smolfile:3: smolbuild.copy[0].from: src/pipe is not a file, directory or symlink "
            "(leave it out with .smolbuildignore, or name the files one by one)"
        ),
        (
            "Smolfile:3: smolbuild.copy[1].from: there is no one.txt in the Smolfile's directory "
            "(the path is relative to the Smolfile)"
        ),
        (
            "Smolfile:6: smolbuild.step[0].inputs[0]: there is no seed.sql in "
            "the Smolfile's directory (the path is relative to the Smolfile)"
        ),
    ]


def test_problems_name_the_sibling_file(context: Path) -> None:
    (context / "Smolfile").write_text('image = "x"')
    (context / "smolbuild.toml").write_text('\ncopy = [{ from = "gone", to = "/" }]')
    (problem,) = problems(context)
    assert problem.startswith("smolbuild.toml:2: smolbuild.copy[0].from: there is no gone")


def test_nothing_is_reached_through_a_symlink(context: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/seed.sql").write_bytes(b"secret")
    (context / "way").symlink_to(tmp_path / "outside")
    write(context, {}, TEXT.replace('"seed.sql"', '"way/seed.sql"'))
    (problem,) = problems(context)
    assert "reached through the symlink way" in problem
    write(context, {}, TEXT.replace('"seed.sql"', '"way"'))
    (entry,) = collect(context).under("way")
    assert (entry.kind, entry.target) == ("symlink", str(tmp_path / "outside"))


def test_a_name_that_is_not_utf8_is_a_problem(context: Path) -> None:
    Path(os.fsdecode(os.fsencode(context / "src") + b"/\xff")).write_bytes(b"")
    (problem,) = problems(context)
    assert "is not UTF-8" in problem
    assert problem.isprintable()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_a_problem(context: Path) -> None:
    (context / "one.txt").chmod(0)
    (problem,) = problems(context)
    assert "one.txt cannot be read: Permission denied" in problem


def test_an_unreadable_ignore_file_is_a_problem(context: Path) -> None:
    (context / ".smolbuildignore").mkdir()
    (problem,) = problems(context)
    assert problem.startswith(".smolbuildignore: it cannot be read")


def test_the_whole_directory_without_git_the_lock_and_what_is_ignored(context: Path) -> None:
    write(
        context,
        {
            ".git/config": b"",
            "src/.git": b"a worktree's",
            "Smolfile.lock": b"",
            "src/x.pyc": b"",
            "build/out": b"",
            "src/build": b"a file",
            ".smolbuildignore": b"# compiled\n*.pyc\n/build/\n\n!src/keep.pyc\n",
            "src/keep.pyc": b"",
        },
        'image="x"\nsmolbuild.copy=[{from=".", to="/all"}]',
    )
    assert [entry.path for entry in collect(context).under(".")] == [
        ".smolbuildignore",
        "Smolfile",
        "one.txt",
        "seed.sql",
        "src",
        "src/a.py",
        "src/build",
        "src/deep",
        "src/deep/b.py",
        "src/keep.pyc",
        "unrelated",
    ]


def test_what_is_named_itself_is_always_taken(context: Path) -> None:
    (context / ".smolbuildignore").write_text("*.sql\nsrc/\ndeep\n")
    files = collect(context)
    assert files.under("seed.sql")
    assert [entry.path for entry in files.under("src")] == ["src", "src/a.py"]


@pytest.mark.parametrize(
    ("pattern", "path", "left_out"),
    [
        ("*.o", "a.o", True),
        ("*.o", "x/y/a.o", True),
        ("*.o", "a.o/b", False),
        ("/a", "a", True),
        ("/a", "x/a", False),
        ("x/*.o", "x/a.o", True),
        ("x/*.o", "y/x/a.o", False),
        ("x/*.o", "x/y/a.o", False),
        ("**/a", "x/y/a", True),
        ("**/a", "a", True),
        ("x/**", "x/y/z", True),
        ("x/**/z", "x/z", True),
        ("x/**/z", "x/a/b/z", True),
        ("a?c", "abc", True),
        ("a?c", "a/c", False),
        ("[a-c]x", "bx", True),
        ("[!a-c]x", "bx", False),
        ("[!a-c]x", "dx", True),
        ("[z-a]x", "bx", False),
        ("[", "[", True),
        ("a.b", "axb", False),
        (r"\#a", "#a", True),
        ("# a", "# a", False),
        ("a/", "a", False),
    ],
)
def test_ignore_patterns(pattern: str, path: str, left_out: bool) -> None:
    assert parse_ignore([pattern]).leaves_out(path, directory=False) == left_out


def test_the_last_matching_pattern_decides() -> None:
    rules = parse_ignore(["*", "!keep", "keep/"])
    assert rules.leaves_out("other", directory=False)
    assert not rules.leaves_out("keep", directory=False)
    assert rules.leaves_out("keep", directory=True)


@given(
    st.lists(st.text(alphabet="ab*?[]!/\\#-^ .", max_size=8), max_size=4),
    st.text("ab/.", max_size=6),
)
@settings(max_examples=300)
def test_every_ignore_file_is_a_valid_one(lines: list[str], path: str) -> None:
    parse_ignore(lines).leaves_out(path, directory=True)


# The key

NAMES = st.sampled_from(["src/a", "src/b", "src/deep/a", "src/deep/er/c", "src/z.py"])
TREES = st.dictionaries(NAMES, st.binary(max_size=8), min_size=1)


def make(parent: str, name: str, tree: dict[str, bytes]) -> Path:
    fixed = {"one.txt": b"1", "seed.sql": b"s"}
    return write(Path(parent, name), fixed | tree)


@given(TREES, st.data())
@settings(max_examples=60, deadline=None)
def test_one_byte_or_the_executable_bit_changes_the_key(
    tree: dict[str, bytes], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        context = make(parent, "c", tree)
        before = key_of(context)
        chosen = context / data.draw(st.sampled_from([*tree, "one.txt", "seed.sql"]))
        old = chosen.read_bytes()
        new = data.draw(st.binary(max_size=9))
        assume(new != old)
        chosen.write_bytes(new)
        assert key_of(context) != before
        chosen.write_bytes(old)
        assert key_of(context) == before
        chosen.chmod(0o755)
        assert key_of(context) != before


@given(TREES, st.permutations(range(5)), st.integers(0, 2**31), st.sampled_from([0, 0o22, 0o77]))
@settings(max_examples=60, deadline=None)
def test_order_mtime_umask_and_place_do_not_change_the_key(
    tree: dict[str, bytes], order: list[int], mtime: int, umask: int
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        one = make(parent, "one", tree)
        names = list(tree)
        shuffled = {names[index]: tree[names[index]] for index in order if index < len(names)}
        old = os.umask(umask)
        try:
            two = make(parent, "elsewhere/two", shuffled | {"not declared": b"x"})
        finally:
            os.umask(old)
        for path in two.rglob("*"):
            os.utime(path, (mtime, mtime))
        assert key_of(one) == key_of(two)
        files = [collect(context) for context in (one, two)]
        copies = read(one).copy
        assert digest_chunks(tar_stream(files[0], copies)) == digest_chunks(
            tar_stream(files[1], copies)
        )


def test_a_file_that_comes_or_goes_changes_the_key(context: Path) -> None:
    before = key_of(context)
    (context / "src/new").write_bytes(b"")
    assert key_of(context) != before
    (context / "src/new").unlink()
    (context / "undeclared").write_bytes(b"x")
    assert key_of(context) == before


def test_what_is_ignored_changes_nothing(context: Path) -> None:
    before = key_of(context)
    (context / ".smolbuildignore").write_text("*.log\n")
    (context / "src/x.log").write_bytes(b"x")
    assert key_of(context) == before


@pytest.mark.parametrize(
    "environment", [{"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8", "HOME": "/nowhere", "USER": "x"}]
)
def test_locale_user_and_hash_seed_do_not_change_the_key(
    context: Path, environment: dict[str, str]
) -> None:
    (context / "src/é").write_bytes(b"x")
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]; from pathlib import Path;"
        "from test_declared_files import key_of; print(key_of(Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, context, Path(__file__).parent, Path(__file__).parents[3]],
        env={"PATH": os.environ["PATH"], "PYTHONHASHSEED": "7", **environment},
        cwd="/",
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == key_of(context)


# The archive


def test_the_archive_of_copies(context: Path) -> None:
    (context / "src/a.py").chmod(0o755)
    (context / "src/link").symlink_to("/usr/bin/env")
    (context / "src/empty").mkdir()
    members = archive(collect(context), *read(context).copy)
    assert list(members) == [
        "app/src/a.py",
        "app/src/deep/b.py",
        "app/src/empty",
        "app/src/link",
        "etc/one.txt",
    ]
    assert [oct(members[name].mode) for name in members] == [
        "0o755",
        "0o644",
        "0o755",
        "0o777",
        "0o644",
    ]
    assert members["app/src/link"].linkname == "/usr/bin/env"
    for member in members.values():
        assert (member.uid, member.gid, member.uname, member.gname) == (0, 0, "", "")
        assert member.mtime == 315532800


@pytest.mark.parametrize(
    ("source", "to", "names"),
    [
        ("one.txt", "/etc/", ["etc/one.txt"]),
        ("one.txt", "/etc/two", ["etc/two"]),
        ("one.txt", "/", ["one.txt"]),
        ("src", "/", ["src/a.py", "src/deep/b.py"]),
        ("src", "/opt", ["opt/a.py", "opt/deep/b.py"]),
        ("src", "/opt/", ["opt/src/a.py", "opt/src/deep/b.py"]),
        ("src/deep", "/opt/", ["opt/deep/b.py"]),
        (".", "/", ["Smolfile", "one.txt", "seed.sql", "src/a.py", "src/deep/b.py", "unrelated"]),
        (".", "/x/", ["x/Smolfile", "x/one.txt", "x/seed.sql", "x/src/a.py", "x/src/deep/b.py"]),
    ],
)
def test_where_copies_land(context: Path, source: str, to: str, names: list[str]) -> None:
    write(context, {}, f'image="x"\nsmolbuild.copy=[{{from="{source}", to="{to}"}}]')
    found = list(archive(collect(context), *read(context).copy))
    assert found[: len(names)] == names


def test_mode_and_owner(context: Path) -> None:
    files = collect(context)
    copies = (
        Copy(source="src", to="/a", mode=0o640, owner="12:34"),
        Copy(source="one.txt", to="/b", owner="postgres:root"),
    )
    assert named_owners(copies) == ("postgres:root",)
    stream = tar_stream(files, copies, owners={"postgres:root": (104, 0)})
    members = unpack(list(stream))
    assert {name: oct(member.mode) for name, member in members.items()} == {
        "a": "0o750",
        "a/a.py": "0o640",
        "a/deep": "0o750",
        "a/deep/b.py": "0o640",
        "b": "0o644",
    }
    assert (members["a/a.py"].uid, members["a/a.py"].gid) == (12, 34)
    assert (members["b"].uid, members["b"].gid) == (104, 0)
    with pytest.raises(BuildError, match="no user or group for owner 'postgres:root'"):
        list(tar_stream(files, copies))


@pytest.mark.parametrize(
    ("owner", "ids"), [("5", (5, 5)), ("root", (0, 0)), ("root:7", (0, 7)), ("9:root", (9, 0))]
)
def test_owners_that_need_no_lookup(context: Path, owner: str, ids: tuple[int, int]) -> None:
    copy = Copy(source="one.txt", to="/b", owner=owner)
    assert named_owners([copy]) == ()
    member = archive(collect(context), copy)["b"]
    assert (member.uid, member.gid) == ids


@pytest.mark.parametrize("owner", ["app", "1:app", "4294967295", "9" * 5000])
def test_owners_that_do(owner: str) -> None:
    assert named_owners([Copy(source="x", to="/b", owner=owner)]) == (owner,)


@given(st.binary(max_size=2000), st.integers(0, 300))
@settings(max_examples=40, deadline=None)
def test_contents_and_long_names_survive(data: bytes, length: int) -> None:
    with tempfile.TemporaryDirectory() as parent:
        name = "n" * max(1, length // 2) + "/" + "é" * max(1, length // 4)
        context = write(Path(parent), {f"src/{name}": data, "one.txt": b"", "seed.sql": b""})
        stream = b"".join(tar_stream(collect(context), read(context).copy))
        assert len(stream) % 512 == 0
        with tarfile.open(fileobj=io.BytesIO(stream)) as opened:
            found = opened.extractfile(f"app/src/{name}")
            assert found is not None
            assert found.read() == data


@pytest.mark.parametrize("data", [b"", b"A", b"2", b"longer"])
def test_a_file_that_changes_during_the_build_is_an_error(context: Path, data: bytes) -> None:
    files = collect(context)
    (context / "one.txt").write_bytes(data)
    with pytest.raises(BuildError, match=r"one\.txt changed during the build") as caught:
        list(tar_stream(files, read(context).copy))
    assert caught.value.code == "file-changed"


def test_a_file_that_becomes_something_else_is_an_error(context: Path) -> None:
    files = collect(context)
    for replace in (Path.unlink, lambda path: path.symlink_to("seed.sql"), replace_by_pipe):
        replace(context / "one.txt")
        with pytest.raises(BuildError, match="changed during the build"):
            list(tar_stream(files, read(context).copy))


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def test_large_files_are_never_in_memory_whole(context: Path) -> None:
    with (context / "one.txt").open("wb") as stream:
        stream.truncate(64 << 20)
    files = collect(context)
    sizes = [len(chunk) for chunk in tar_stream(files, read(context).copy)]
    assert max(sizes) <= 1 << 20
    assert sum(sizes) > 64 << 20


def test_the_value_does_not_hold_the_place(context: Path, tmp_path: Path) -> None:
    files = collect(context)
    assert dataclasses.replace(files, context=tmp_path) == files
