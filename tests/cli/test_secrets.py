"""Secrets in real guests: there during their step, and nowhere afterwards."""

import json
import secrets as randomness
from pathlib import Path

import pytest

SMOLFILE = """\
image = "./rootfs/"
cpus = 1
memory = 128
overlay = 1

[smolbuild]
name = "test/secrets"

[smolbuild.secrets]
TOKEN = {{ from_command = ["cat", "token"] }}
{rest}
"""
CLEAN = """
[[smolbuild.step]]
name = "uses"
user = "web"
secrets = ["TOKEN", "OTHER"]
run = '''
set -e
test "$TOKEN" = "$(cat /run/secrets/TOKEN)"
test "$TOKEN_FILE" = /run/secrets/TOKEN
test "$(stat -c %a:%u /run/secrets/TOKEN)" = 400:1000
test -n "$OTHER"
echo "the token is $TOKEN."
printf %s "$TOKEN" | tr a-z A-Z | grep -q . && echo done
'''

[[smolbuild.step]]
name = "after"
run = "test -z \\"$TOKEN\\" && ! test -e /run/secrets && ! grep -q /run/secrets /proc/mounts"

[[smolbuild.service]]
name = "idle"
run = "test -z \\"$TOKEN\\" && touch /run/ready && exec sleep 1000000"
ready = { file = "/run/ready" }
"""


@pytest.fixture
def token() -> str:
    return "tok-" + randomness.token_urlsafe(24)


@pytest.fixture
def secret_project(own_project: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    (own_project / "token").write_text(token + "\n")
    monkeypatch.setenv("OTHER", "other-" + token[::-1])
    return own_project


def write(project: Path, rest: str) -> None:
    (project / "Smolfile").write_text(SMOLFILE.format(rest=rest))


def test_a_step_that_leaves_nothing_passes_and_nothing_tells(fresh, secret_project, token):
    write(secret_project, CLEAN)
    done = fresh("build", "-C", str(secret_project), "--json", "--progress", "json")
    assert done.status == 0, done.stderr
    assert token not in done.stdout + done.stderr
    shown = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert any("the token is ***." in json.dumps(event) for event in shown)
