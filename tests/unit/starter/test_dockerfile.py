"""Dockerfiles are read as Docker reads them; the result is a Smolfile, or an error of ours."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolbuild.core.errors import UsageError
from smolbuild.model.parse import parse_text
from smolbuild.model.smolfile import Copy, Dockerfile, ExecProbe, PortProbe
from smolbuild.starter.dockerfile import expand, parse_dockerfile, split_words
from smolbuild.starter.draft import draft_text
from smolbuild.starter.translate import keep_dockerfile, translate_dockerfile

WHOLE = r"""
# syntax=example.com/dockerfile:1
ARG V=3.12
FROM registry.example.com/python:${V}-slim
LABEL team=a
ARG MODE=fast
ENV A=1 B="two words" \
    C='$A'
ENV OLD style of value
WORKDIR /app
COPY requirements.txt ./
RUN pip install \
    # not part of it
    -r requirements.txt && echo "it's ${HOME}"
COPY --chown=web:web --chmod=755 api api
ADD https://files.example.com/x.tar /
ENV A=2
RUN ["python3", "-m", "compileall", "a b"]
RUN --network=none <<'EOF'
set -e
echo hi
EOF
COPY one.txt two.txt etc/
COPY --from=other /x /y
USER 1000:1000
EXPOSE 8000/tcp 53/udp
ENTRYPOINT ["python3"]
CMD ["-m", "api"]
HEALTHCHECK --interval=1m30s --timeout=2s --retries=5 CMD curl -f http://127.0.0.1:8000/ || exit 1
ONBUILD RUN x
"""


def translate(text: str, context: Path):
    draft = translate_dockerfile(text, file="Dockerfile", context=context, name="acme/x")
    return draft, parse_text(draft_text(draft), file="Smolfile", environment={})


def test_a_whole_file_becomes_what_it_says(tmp_path):
    (tmp_path / "api").mkdir()
    draft, smolfile = translate(WHOLE, tmp_path)
    assert smolfile.image == "registry.example.com/python:3.12-slim"
    assert dict(smolfile.env) == {"A": "2", "B": "two words", "C": "$A", "OLD": "style of value"}
    assert (smolfile.workdir, smolfile.user) == ("/app", "1000:1000")
    assert (smolfile.entrypoint, smolfile.cmd) == (("python3",), ("-m", "api"))
    one, two, three, files = smolfile.steps
    assert one.run == 'pip install \\\n    -r requirements.txt && echo "it\'s ${HOME}"'
    assert [(c.source, c.to) for c in one.copy] == [("requirements.txt", "/app/")]
    assert dict(one.env) == {"MODE": "fast", "A": "1"}  # what it is at the end stands at the top
    assert one.workdir == "/app"
    assert two.run == "python3 -m compileall 'a b'"
    assert two.copy == (Copy(source="api", to="/app/api", mode=0o755, owner="web:web"),)
    assert three.run == "set -e\necho hi\n"
    assert [(c.source, c.to) for c in files.copy] == [
        ("one.txt", "/app/etc/"), ("two.txt", "/app/etc/"),
    ]  # fmt: skip
    health = smolfile.health
    assert health is not None
    assert health.probe == ExecProbe(
        argv=("/bin/sh", "-c", "curl -f http://127.0.0.1:8000/ || exit 1")
    )
    assert (health.interval, health.timeout, health.retries) == (90.0, 2.0, 5)
    left = "\n".join(draft.left_out)
    for what in ("LABEL", "ADD https", "--network", "COPY --from", "53/udp", "ONBUILD"):
        assert what in left
    assert "# - line" in draft_text(draft)


def test_without_a_health_check_the_port_is_asked(tmp_path):
    _, smolfile = translate("FROM x\nEXPOSE 8000\nCMD python3 -m api\n", tmp_path)
    assert smolfile.health is not None
    assert smolfile.health.probe == PortProbe(port=8000)
    assert smolfile.cmd == ("/bin/sh", "-c", "python3 -m api")


def test_another_shell_runs_the_commands(tmp_path):
    _, smolfile = translate('FROM x\nSHELL ["/bin/bash", "-c"]\nRUN echo $0\n', tmp_path)
    assert smolfile.steps[0].run == "/bin/bash -c 'echo $0'"


def test_the_escape_directive_counts(tmp_path):
    _, smolfile = translate("# escape=`\nFROM x\nRUN echo a `\n  b\\c\n", tmp_path)
    assert smolfile.steps[0].run == "echo a \\\n  b\\c"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("FROM a\nFROM b\n", "dockerfile-stages"),
        ("RUN x\n", "dockerfile-stages"),
        ("FROM scratch\n", "dockerfile-base"),
        ("ARG X\nFROM $X\n", "dockerfile-base"),
        ("", "dockerfile"),
        ("# only this\n", "dockerfile"),
        ("FROM x\nRUN <<EOF\necho\n", "dockerfile"),
    ],
)
def test_what_cannot_be_translated_is_an_error_with_a_reason(tmp_path, text, code):
    with pytest.raises(UsageError) as caught:
        translate(text, tmp_path)
    assert caught.value.code == code


def test_variables_and_quotes():
    known = {"V": "3", "E": ""}
    assert expand(r"$V ${V} ${N:-d} ${E:-d} ${V:+y} ${N:+y} \$V $N", known) == r"3 3 d d y  \$V "
    words = split_words("""A=1 B="x $V y" C='$V' D=${N:-9}z E=a\\ b F="\\"q\\"" """, known)
    assert words == ["A=1", "B=x 3 y", "C=$V", "D=9z", "E=a b", 'F="q"']


def test_lines_are_counted_from_the_file():
    found = parse_dockerfile("\n# c\nFROM x\n\nRUN a \\\n\n  # c\n  b\nUSER u\n", file="D")
    assert [(item.keyword, item.line) for item in found] == [("FROM", 3), ("RUN", 5), ("USER", 9)]
    assert found[1].text == "a   b"


def test_two_backslashes_at_the_end_continue_nothing():
    found = parse_dockerfile("FROM x\nRUN a \\\\\nENV B=1\n", file="D")
    assert [item.keyword for item in found] == ["FROM", "RUN", "ENV"]


def test_a_dockerfile_that_is_kept_is_named():
    draft = keep_dockerfile("FROM a\nHEALTHCHECK CMD x\nFROM b\nEXPOSE 80\n", file="D", name="x")
    assert draft.base is not None
    assert draft.base.values == {"dockerfile": "D"}
    assert draft.health is not None
    assert draft.health.values["port"] == 80
    base = parse_text(draft_text(draft), file="Smolfile", environment={}).base
    assert base == Dockerfile(dockerfile="D")
    with pytest.raises(UsageError, match="outside"):
        keep_dockerfile("FROM a\n", file="../D", name="x")


instruction = st.sampled_from(
    ["RUN", "COPY", "ADD", "ENV", "ARG", "WORKDIR", "USER", "EXPOSE", "CMD", "ENTRYPOINT",
     "HEALTHCHECK", "SHELL", "LABEL", "VOLUME", "STOPSIGNAL", "run", "X"]
)  # fmt: skip
rest = st.text(
    alphabet=st.sampled_from("ab1/.-_=:$ {}[]\"'\\,\n\t#<>EOF\x00\x7fü"), max_size=30
) | st.sampled_from(['["a", "b"]', "--interval=5s CMD x", "--chown=a:b . /x", "8000", "a b c/"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(instruction, rest), max_size=6))
def test_any_dockerfile_gives_a_valid_smolfile_or_our_error(tmp_path_factory, parts):
    context = tmp_path_factory.getbasetemp()
    text = "FROM x\n" + "".join(f"{keyword} {words}\n" for keyword, words in parts)
    try:
        _, smolfile = translate(text, context)
    except UsageError:
        return
    assert smolfile.image
