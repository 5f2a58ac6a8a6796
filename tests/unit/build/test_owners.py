import io
import tarfile
from collections.abc import Iterable
from typing import cast

import pytest

from smolbuild.build.owners import guest_owners, resolve_owners
from smolbuild.core.errors import BuildError
from smolbuild.machine.base import Machine
from smolbuild.model.smolfile import Copy

PASSWD = b"root:x:0:0::/root:/bin/sh\npostgres:x:104:111::/:/bin/sh\nbroken\nodd:x:abc:1\n"
GROUP = b"root:x:0:\nwww-data:x:33:\n"


@pytest.mark.parametrize(
    ("owner", "ids"),
    [
        ("postgres", (104, 111)),
        ("postgres:www-data", (104, 33)),
        ("postgres:7", (104, 7)),
        ("7:www-data", (7, 33)),
        ("nobody", None),
        ("postgres:nogroup", None),
        ("odd", None),
        ("broken", None),
    ],
)
def test_names_are_resolved_by_the_guests_own_database(
    owner: str, ids: tuple[int, int] | None
) -> None:
    assert resolve_owners([owner], PASSWD, GROUP).get(owner) == ids


class Guest:
    """Only what is asked for: files as tar streams."""

    def __init__(self, kind: bytes = tarfile.REGTYPE) -> None:
        self.kind = kind
        self.asked: list[str] = []

    def get(self, path: str, *, timeout: float) -> Iterable[bytes]:
        assert timeout > 0
        self.asked.append(path)
        data = {"/etc/passwd": PASSWD, "/etc/group": GROUP}[path]
        info = tarfile.TarInfo(path.rsplit("/", 1)[-1])
        info.type = self.kind
        if self.kind == tarfile.REGTYPE:
            info.size = len(data)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.addfile(info, io.BytesIO(data))
        whole = packed.getvalue()
        return (whole[at : at + 700] for at in range(0, len(whole), 700))


def test_the_guest_is_asked_only_when_a_name_is_used() -> None:
    guest = Guest()
    machine = cast("Machine", guest)
    assert (
        guest_owners(machine, [Copy(source="a", to="/a", owner="1:2"), Copy(source="b", to="/b")])
        == {}
    )
    assert guest.asked == []
    assert guest_owners(machine, [Copy(source="a", to="/a", owner="postgres")]) == {
        "postgres": (104, 111)
    }


def test_a_database_that_is_no_file_is_an_error() -> None:
    with pytest.raises(BuildError, match="is not a file"):
        guest_owners(
            cast("Machine", Guest(tarfile.DIRTYPE)), [Copy(source="a", to="/a", owner="postgres")]
        )
