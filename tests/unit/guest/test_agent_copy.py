"""Tar streams in and out of the real agent, against Python's own tarfile."""

import contextlib
import io
import os
import stat
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smolbuild.core.errors import MachineError
from smolbuild.machine.channel import AgentChannel


def archive(*members: tuple[tarfile.TarInfo, bytes], kind: int = tarfile.PAX_FORMAT) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=kind) as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return target.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in {"uid": os.geteuid(), "gid": os.getegid(), **fields}.items():
        setattr(info, field, value)
    return info


def put(channel: AgentChannel, data: bytes, target: Path, step: int = 10_007) -> None:
    chunks = (data[at : at + step] for at in range(0, len(data), step))
    channel.put(chunks, str(target), timeout=20)


LONG = "/".join(["a-rather-long-directory-name"] * 9) + "/" + "f" * 150


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_tree_goes_in_and_comes_out_the_same(
    channel: AgentChannel, tmp_path: Path, kind: int
) -> None:
    body = os.urandom(200_000)
    data = archive(
        (member("d", tarfile.DIRTYPE, mode=0o2751), b""),
        (member("d/file", mode=0o640, mtime=1_000_000_007), body),
        (member("d/empty", mode=0o600), b""),
        (member("d/hard", tarfile.LNKTYPE, linkname="d/file"), b""),
        (member("d/soft", tarfile.SYMTYPE, linkname="../nowhere/at all"), b""),
        (member("d/long-link", tarfile.SYMTYPE, linkname="x" * 300), b""),
        (member("d/pipe", tarfile.FIFOTYPE, mode=0o622), b""),
        (member(f"d/{LONG}", mode=0o4755), b"long"),
        (member("d/ünï", mode=0o644), b"text"),
        kind=kind,
    )
    target = tmp_path / "made" / "below"
    put(channel, data, target)
    top = target / "d"
    assert (top / "file").read_bytes() == body
    assert (top / "file").stat().st_mtime == 1_000_000_007
    assert (top / "file").stat().st_ino == (top / "hard").stat().st_ino
    assert str((top / "soft").readlink()) == "../nowhere/at all"
    assert str((top / "long-link").readlink()) == "x" * 300
    assert stat.S_ISFIFO((top / "pipe").stat().st_mode)
    assert stat.S_IMODE((top / LONG).stat().st_mode) == 0o4755
    assert stat.S_IMODE(top.stat().st_mode) == 0o2751

    back = b"".join(channel.get(str(top), timeout=20))
    with tarfile.open(fileobj=io.BytesIO(back)) as tar:
        found = {info.name: info for info in tar}
        assert found["d"].mode == 0o2751
        assert found["d/file"].mode == 0o640
        assert found["d/file"].mtime == 1_000_000_007
        assert tar.extractfile("d/file").read() == body  # type: ignore[union-attr]
        assert found["d/hard"].islnk()
        assert found["d/hard"].linkname == "d/file"
        assert found["d/long-link"].linkname == "x" * 300
        assert found["d/pipe"].isfifo()
        assert tar.extractfile(f"d/{LONG}").read() == b"long"  # type: ignore[union-attr]
        assert found["d/ünï"].size == 4


def test_the_same_tree_is_the_same_archive_and_sorted(
    channel: AgentChannel, tmp_path: Path
) -> None:
    for name in ("b", "a", "c", "B"):
        (tmp_path / name).write_text(name)
    first, second = (b"".join(channel.get(str(tmp_path), timeout=20)) for _ in range(2))
    assert first == second
    with tarfile.open(fileobj=io.BytesIO(first)) as tar:
        names = [name.rsplit("/")[-1] for name in tar.getnames()[1:]]
    assert names == sorted(names)
    assert "a" in names


def test_files_and_links_are_replaced_directories_kept(
    channel: AgentChannel, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "kept").write_text("kept")
    (tmp_path / "dir").symlink_to("real")
    (tmp_path / "file").symlink_to("/etc/passwd")
    put(
        channel,
        archive(
            (member("dir", tarfile.DIRTYPE, mode=0o755), b""),
            (member("dir/new"), b"new"),
            (member("file", mode=0o644), b"mine"),
        ),
        tmp_path,
    )
    assert (tmp_path / "dir").is_symlink()
    assert (tmp_path / "real" / "kept").exists()
    assert (tmp_path / "real" / "new").read_text() == "new"
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (archive((member("../out"), b"x")), "leads out"),
        (archive((member("a/../../out"), b"x")), "leads out"),
        (archive((member("h", tarfile.LNKTYPE, linkname="../../etc/passwd"), b"")), "leads out"),
        (archive((member("a"), b"x" * 1000))[:700], "ends early"),
        (b"\xff" * 1024, "damaged"),
        (b"", "ends early"),
    ],
)
def test_hostile_and_damaged_archives_are_refused(
    channel: AgentChannel, tmp_path: Path, data: bytes, message: str
) -> None:
    with pytest.raises(MachineError, match=message) as caught:
        put(channel, data, tmp_path / "t")
    assert caught.value.code == "agent-system"
    assert not (tmp_path / "out").exists()
    channel.ping()


def test_an_absolute_name_stays_below_the_target(channel: AgentChannel, tmp_path: Path) -> None:
    put(channel, archive((member("/etc/x"), b"x")), tmp_path)
    assert (tmp_path / "etc" / "x").read_text() == "x"


def test_what_cannot_be_packed_is_an_error(channel: AgentChannel) -> None:
    with pytest.raises(MachineError, match="No such file"):
        list(channel.get("/no/such/file", timeout=10))


def test_leaving_a_copy_early_leaves_no_worker(channel: AgentChannel, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 4_000_000)
    stream = channel.get(str(tmp_path / "large"), timeout=10)
    next(stream)
    stream.close()
    channel.quiesce()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_bytes_crash_the_unpacker(
    channel: AgentChannel, tmp_path: Path, data: st.DataObject
) -> None:
    good = bytearray(
        archive(
            (member("d", tarfile.DIRTYPE), b""),
            (member("d/" + "n" * 200), b"body" * 200),
            (member("l", tarfile.SYMTYPE, linkname="t" * 200), b""),
        )
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(good) - 1))
        good[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MachineError):
        put(channel, bytes(good), tmp_path / "t")
    channel.ping()
