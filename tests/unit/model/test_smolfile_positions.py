"""The position scanner against tomllib: every key has a line, and that line holds the key."""

import tomllib
from dataclasses import dataclass, field

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from smolbuild.model.positions import NestingError, join_key, scan_positions

SCALARS = [
    "1",
    "-0x1F".removeprefix("-"),
    "1_000.5e-3",
    "inf",
    "true",
    "1979-05-27 07:32:01.5+01:00",
    "07:32:00",
    '"plain # no comment"',
    r'"escaped \" quote \\"',
    '""',
    "''",
    r"'literal \ [fake]'",
    '"""\n[fake]\nfake = "x"\nsh -c \'a "b"\'\n"""',
    '"""one " two "" three \\""" end"""""',
    "'''\ncat <<'EOF' > /x\n[[fake]]\nfake = { a = 1 }\nEOF\n'''",
    "'''two quotes at the end'''''",
    '"""\\\n   folded \\\n   line"""',
]
COMMENTS = ["", " # fake = 1", " # [fake] '''", '#"""']


@dataclass
class Writer:
    """Writes a random document in which every key has a token of its own."""

    draw: st.DrawFn
    out: list[str] = field(default_factory=list)
    count: int = 0

    def key(self) -> str:
        self.count += 1
        token = f"k{self.count}"
        return self.draw(
            st.sampled_from(
                [
                    token,
                    f'"{token}"',
                    f"'{token}'",
                    f'"{token}.x y"',
                    f"'{token}é\"'",
                    f'"{token}\\" \\u00e9"',
                ]
            )
        )

    def dotted(self) -> str:
        parts = [self.key() for _ in range(self.draw(st.integers(1, 3)))]
        return self.draw(st.sampled_from([".", " . "])).join(parts)

    def value(self, depth: int) -> str:
        kind = self.draw(st.integers(0, 3 if depth else 1))
        if kind == 2:
            return self.array(depth - 1)
        if kind == 3:
            return self.inline(depth - 1)
        return self.draw(st.sampled_from(SCALARS))

    def array(self, depth: int) -> str:
        gap = self.draw(st.sampled_from(["", " ", "\n  ", " # fake = [\n"]))
        items = [gap + self.value(depth) + gap for _ in range(self.draw(st.integers(0, 3)))]
        last = "," if items and self.draw(st.booleans()) else ""
        return "[" + ",".join(items) + last + gap + "]"

    def inline(self, depth: int) -> str:
        entries = [
            f"{self.dotted()} = {self.value(depth)}" for _ in range(self.draw(st.integers(0, 3)))
        ]
        return "{ " + ", ".join(entries) + " }"

    def body(self) -> None:
        for _ in range(self.draw(st.integers(0, 4))):
            comment = self.draw(st.sampled_from(COMMENTS))
            self.out.append(f"{self.draw(st.sampled_from(['', '  ']))}{self.dotted()} = ")
            self.out[-1] += self.value(2) + comment
            self.out.extend(self.draw(st.lists(st.sampled_from(["", "# fake = 2"]), max_size=1)))

    def document(self) -> str:
        self.body()
        for _ in range(self.draw(st.integers(0, 3))):
            header = self.dotted()
            if self.draw(st.booleans()):
                self.out.append(f"[{header}]" + self.draw(st.sampled_from(COMMENTS)))
                self.body()
                continue
            for _ in range(self.draw(st.integers(1, 3))):
                self.out.append(f"[[ {header} ]]")
                self.body()
                if self.draw(st.booleans()):
                    self.out.append(f"[{header}.{self.key()}]")
                    self.body()
                if self.draw(st.booleans()):
                    inner = f"{header}.{self.key()}"
                    self.out += [f"[[{inner}]]", f"{self.key()} = 1", f"[[{inner}]]"]
        text = "\n".join(self.out) + self.draw(st.sampled_from(["", "\n"]))
        return text.replace("\n", self.draw(st.sampled_from(["\n", "\r\n"])))


@st.composite
def documents(draw: st.DrawFn) -> str:
    return Writer(draw).document()


def paths(value: object, path: str = "") -> dict[str, str]:
    """Return every path of a parsed document with the last key on it."""
    found: dict[str, str] = {}
    if isinstance(value, dict):
        for name, item in value.items():
            inner = join_key(path, name)
            found[inner] = name
            found.update(paths(item, inner))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found[f"{path}[{index}]"] = ""
            found.update(paths(item, f"{path}[{index}]"))
    return found


@given(documents())
@settings(max_examples=300, deadline=None)
def test_every_key_of_a_document_has_the_line_it_stands_on(text: str) -> None:
    expected = paths(tomllib.loads(text))
    lines = scan_positions(text)
    assert set(lines) == set(expected)
    written = text.split("\n")
    for path, name in expected.items():
        token = name.split(".")[0].split("é")[0].split('"')[0].strip()
        assert token in written[lines[path] - 1], (path, lines[path])


@given(st.text(alphabet="ab.\"'=[]{},# \n\r\\1", max_size=40))
@settings(max_examples=2000, deadline=None)
@example('a."b" = [{a=1},{b=2}]\n[[b]]\n[b.a]\n[[b]]')
@example('"a\\u0062".b = 1')
def test_whatever_tomllib_reads_the_scanner_reads_too(text: str) -> None:
    lines = scan_positions(text)
    try:
        expected = paths(tomllib.loads(text))
    except tomllib.TOMLDecodeError:
        event("not TOML")
        return
    event("TOML")
    assert set(lines) == set(expected)


def test_lines_of_elements_headers_and_here_documents() -> None:
    text = (
        'image = "x"\r\ninit = [\r\n  "one",\r\n  """\r\ncat <<\'EOF\'\r\n[fake]\r\nEOF\r\n""",\r\n'
        "  'three',\r\n]\r\n[smolbuild.policy]\r\nmax_age = 1\r\n[smolbuild]\r\nname = 'n'\r\n"
    )
    lines = scan_positions(text)
    assert [lines[f"init[{i}]"] for i in range(3)] == [3, 4, 9]
    assert lines["smolbuild.policy.max_age"] == 12
    assert lines["smolbuild"] == 13, "its own header, not the one below it"


@pytest.mark.parametrize(
    "text", ["a." * 100_000 + "a = 1", "x = " + "[" * 100_000, "[" + "a." * 100 + "a]\n"]
)
def test_absurd_nesting_is_refused_at_once(text: str) -> None:
    with pytest.raises(NestingError) as caught:
        scan_positions("ok = 1\n" + text)
    assert caught.value.line == 2


def test_many_keys_below_a_very_long_path_do_not_fill_the_memory() -> None:
    text = "[" + "x" * 100_000 + "]\n" + "".join(f"a{i} = 1\n" for i in range(50_000))
    lines = scan_positions(text)
    assert sum(map(len, lines)) < 1_000_000
