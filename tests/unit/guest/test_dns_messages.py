"""The resolver's reading and writing of DNS messages, under the sanitizers."""

import itertools
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smolbuild.guest import compile as agent_compile

SANITIZED = ("-O1", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror")
Answer = Callable[[list[bytes]], list[tuple[bool, str, bytes]]]


@pytest.fixture(scope="module")
def resolver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("resolver") / "resolver"
    guest = Path(agent_compile.__file__).parent
    subprocess.run(
        ["gcc", *SANITIZED, "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
         f"-I{guest}", "-o", str(program), str(Path(__file__).with_name("resolver.c")),
         str(guest / "message.c")],
        check=True,
        timeout=120,
    )  # fmt: skip
    return program


@pytest.fixture(scope="module")
def answer(resolver: Path) -> Answer:
    def run(queries: list[bytes]) -> list[tuple[bool, str, bytes]]:
        data = b"".join(struct.pack(">H", len(query)) + query for query in queries)
        done = subprocess.run([resolver], input=data, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr.decode()
        out, answers = done.stdout, []
        while out:
            good, size = struct.unpack_from(">BH", out)
            name, out = out[3 : 3 + size], out[3 + size :]
            (size,) = struct.unpack_from(">H", out)
            answers.append((bool(good), name.decode(), out[2 : 2 + size]))
            out = out[2 + size :]
        return answers

    return run


def question(name: bytes, kind: int = 1, *, header: bytes = b"") -> bytes:
    labels = b"".join(bytes([len(label)]) + label for label in name.split(b".") if label)
    head = header or struct.pack(">HHHHHH", 7, 0x0100, 1, 0, 0, 0)
    return head + labels + b"\0" + struct.pack(">HH", kind, 1)


def test_a_question_is_answered_with_the_address(answer: Answer) -> None:
    query = question(b"Packages.Example.com")
    with_options = query[:11] + b"\1" + query[12:] + b"\0\0\x29\x10\0\0\0\0\0\0\0"
    for good, name, said in answer([query, with_options]):
        assert (good, name) == (True, "packages.example.com")
        assert said[:2] == query[:2]
        assert struct.unpack_from(">HHHHH", said, 2) == (0x8180, 1, 1, 0, 0)
        assert said[12 : len(query)] == query[12:]
        assert said[len(query) :] == bytes.fromhex("c00c 0001 0001 0000003c 0004 04030201")


@pytest.mark.parametrize(
    ("query", "code"),
    [
        (question(b"a\x1bb"), 1),
        (question(b"a b"), 1),
        (question(b"x" * 63 + b"." + b"y" * 64), 1),
        (question(b".".join([b"x" * 63] * 4)), 1),
        (question(b"a")[:-1], 1),
        (question(b"a", header=struct.pack(">HHHHHH", 7, 0x0100, 2, 0, 0, 0)), 1),
        (question(b"a", header=struct.pack(">HHHHHH", 7, 0x2900, 1, 0, 0, 0)), 4),
        (question(b"a")[:-1] + b"\3", 5),
        (struct.pack(">HHHHHH", 7, 0, 1, 0, 0, 0) + b"\xc0\x0c\0\1\0\1", 1),
        (question(b"a", header=struct.pack(">HHHHHH", 7, 0x8100, 1, 0, 0, 0)), None),
        (b"\0" * 11, None),
        (b"", None),
    ],
)
def test_others_get_an_error_or_nothing(answer: Answer, query: bytes, code: int | None) -> None:
    ((good, _, said),) = answer([query])
    assert not good
    if code is None:
        assert said == b""
    else:
        assert (said[2] >> 7, said[3] & 15, said[6:12]) == (1, code, bytes(6))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=512),
            st.builds(
                lambda body, flags: struct.pack(">HHHHHH", 1, flags, 1, 0, 0, 0) + body,
                st.binary(max_size=500),
                st.sampled_from([0, 0x0100]),
            ),
            st.builds(
                lambda name, cut: question(name)[:cut],
                st.binary(max_size=300).filter(
                    lambda name: all(len(part) < 256 for part in name.split(b"."))
                ),
                st.integers(0, 512),
            ),
        ),
        max_size=100,
    )
)
def test_no_message_confuses_it(answer: Answer, queries: list[bytes]) -> None:
    for (good, name, said), query in itertools.zip_longest(answer(queries), queries):
        assert len(said) <= 512
        if good:
            assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.")
            assert len(name) <= 253
            assert said.startswith(query[:2])
