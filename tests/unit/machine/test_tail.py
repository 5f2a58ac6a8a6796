import os
import socket

from smolbuild.core.clock import Deadline
from smolbuild.machine.tail import Tail


def test_only_the_end_is_kept():
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    tail = Tail(ours, reader, started=b"Linux version")
    with theirs:
        theirs.sendall(b"Linux ver")
        theirs.sendall(b"sion 6\r\n")
        for _ in range(100):
            theirs.sendall(b"noise " * 1000)
        theirs.sendall(b"last words \xff\r\n")
    os.write(writer, b"qemu: oh no\n")
    os.close(writer)
    tail.finish(deadline=Deadline.after(5))
    assert tail.kernel_seen
    assert tail.await_kernel(0)
    assert tail.console().endswith("last words \N{REPLACEMENT CHARACTER}\n")
    assert len(tail.console()) <= 16384
    assert tail.errors() == "qemu: oh no\n"


def test_an_engine_that_ends_before_the_kernel_is_not_waited_for():
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    tail = Tail(ours, reader, started=b"Linux version")
    theirs.close()
    os.close(writer)
    assert not tail.await_kernel(30)
    assert not tail.kernel_seen
