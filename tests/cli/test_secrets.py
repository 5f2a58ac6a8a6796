"""Secrets in real guests: there during their step, and nowhere afterwards."""

import dataclasses
import io
import json
import re
import secrets as randomness
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import zstandard
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from smolbuild.residue.forms import forms_of

SMOLFILE = """\
image = "./rootfs/"
cpus = 1
memory = 128
overlay = 1

[smolbuild]
name = "test/secrets"

[smolbuild.secrets]
TOKEN = {{ from_command = ["cat", "token"] }}
DELETED = {{ from_file = "deleted" }}
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


LEAKS = """
[[smolbuild.step]]
name = "leaks"
secrets = ["TOKEN", "DELETED", "OTHER", "HELD"]
run = '''
set -e
mkdir -p /root
echo "curl -u me:$OTHER http://host.example.com" >> /root/.ash_history
printf "user:%s" "$TOKEN" | base64 > /etc/app.conf
printf %s "$DELETED" > /root/key; sync; rm /root/key; sync
mkdir -p /run/app; printf %s "$HELD" > /run/app/key
'''

[[smolbuild.step]]
name = "later"
run = "echo later > /later"

[[smolbuild.service]]
name = "daemon"
run = "read -r KEPT < /run/app/key; rm /run/app/key; touch /run/ready; while :; do sleep 1000; done"
ready = { file = "/run/ready" }
"""
SCRUBBED = (
    LEAKS.replace(', "HELD"', "").replace('printf %s "$HELD"', "printf x")
    + """
[smolbuild.scrub]
run = ["rm -f /root/.ash_history /etc/app.conf", "echo scrubbed $DELETED_FILE"]
"""
)


@dataclasses.dataclass(frozen=True)
class Project:
    path: Path
    values: dict[str, str]

    def write(self, rest: str) -> None:
        (self.path / "Smolfile").write_text(SMOLFILE.format(rest=rest))


@pytest.fixture
def secret_project(own_project: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    names = ("TOKEN", "OTHER", "DELETED", "HELD")
    values = {name: f"tok-{randomness.token_urlsafe(24)}" for name in names}
    (own_project / "token").write_text(values["TOKEN"] + "\n")
    (own_project / "deleted").write_text(values["DELETED"] + "\n")
    monkeypatch.setenv("OTHER", values["OTHER"])
    monkeypatch.setenv("HELD", values["HELD"])
    return Project(own_project, values)


def forms(values: Iterable[str]) -> list[bytes]:
    return [form.data for value in values for form in forms_of(value.encode())]


def assert_nothing_tells(home: Path, done, values: Iterable[str], scratch: Path) -> None:
    """Look with another program than ours into every file, and into what blobs decompress to."""
    needles = forms(values)
    for form in needles:
        assert form not in (done.stdout + done.stderr).encode()
    plain = scratch / "plain"
    plain.mkdir()
    for path in (home / "store").rglob("*"):
        with path.open("rb") if path.is_file() else io.BytesIO() as blob:
            if blob.read(4) == b"\x28\xb5\x2f\xfd":
                blob.seek(0)
                with (plain / path.name).open("wb") as target:
                    zstandard.ZstdDecompressor().copy_stream(blob, target)
    (needle_file := scratch / "needles").write_bytes(
        b"\n".join(form for form in needles if b"\0" not in form)
    )
    grep = ["grep", "-raFlf", needle_file, needle_file, home, plain]
    told = subprocess.run(grep, capture_output=True, text=True, env={"LC_ALL": "C"}, check=False)
    assert told.stdout.split() == [str(needle_file)]  # which shows that it would find them


def test_a_step_that_leaves_nothing_passes_and_nothing_tells(fresh, secret_project, tmp_path):
    secret_project.write(CLEAN)
    done = fresh("build", "-C", str(secret_project.path), "--json", "--progress", "json")
    assert done.status == 0, done.stderr
    shown = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert any("the token is ***." in json.dumps(event) for event in shown)
    assert_nothing_tells(fresh.home.root, done, secret_project.values.values(), tmp_path)
    # What is cached needs no secret any more: neither a step of it nor an unchanged build reads it.
    (secret_project.path / "token").unlink()
    secret_project.write(CLEAN.replace("exec sleep 1000000", "exec sleep 2000000"))
    again = fresh("build", "-C", str(secret_project.path), "--json")
    assert again.status == 0, again.stderr


def test_each_leak_is_found_and_its_place_named(fresh, secret_project, tmp_path):
    secret_project.write(LEAKS)
    done = fresh("build", "-C", str(secret_project.path), "--json")
    assert done.status == 3, done.stderr
    error = done.document("error")["error"]
    assert error["code"] == "residue"
    for line in (
        "the secret OTHER, raw: file /root/.ash_history, written by leaks",
        "the secret TOKEN, base64: file /etc/app.conf, written by leaks",
        "the secret DELETED, raw: free block, written by leaks",
        "the secret HELD, raw: memory",
    ):
        assert line in error["details"]
    assert "the secret HELD, raw: f" not in error["details"]
    for word in ("[smolbuild.scrub]", "restart the service", "remove the file"):
        assert word in error["hint"]
    assert "after step leaks a secret is on the disk" in done.stderr
    assert_nothing_tells(fresh.home.root, done, secret_project.values.values(), tmp_path)


def test_what_is_scrubbed_passes(fresh, secret_project, tmp_path):
    secret_project.write(SCRUBBED)
    done = fresh("build", "-C", str(secret_project.path), "-t", "clean", "--json")
    assert done.status == 0, done.stderr
    assert_nothing_tells(fresh.home.root, done, secret_project.values.values(), tmp_path)
    assert fresh("run", "clean", "--", "cat", "/later").stdout == "later\n"


def test_a_step_that_fails_or_is_killed_keeps_no_secret(fresh, secret_project, tmp_path):
    secret_project.write(
        CLEAN.replace("echo done", 'echo "$OTHER" >&2; sleep 100').replace(
            'user = "web"', 'user = "web"\ntimeout = "2s"'
        )
    )
    done = fresh("build", "-C", str(secret_project.path), "--json")
    assert done.status == 1
    assert done.document("error")["error"]["code"] == "step-timeout"
    assert "***" in done.document("error")["error"]["details"]
    assert_nothing_tells(fresh.home.root, done, secret_project.values.values(), tmp_path)


def test_a_missing_secret_is_named(fresh, secret_project, monkeypatch):
    monkeypatch.delenv("OTHER")
    secret_project.write(CLEAN)
    done = fresh("build", "-C", str(secret_project.path), "--json")
    assert done.status == 2
    assert "the secret OTHER: the variable OTHER is not set" in done.stdout


KEYS = """
[[smolbuild.step]]
name = "keys"
copy = [{{ from = "fixtures", to = "/opt/fixtures" }}]
run = "mkdir -p /var/lib && cat /etc/known.key > /var/lib/copy.key"

[smolbuild.scrub]
allow = [{allow}]
"""


def private_key() -> bytes:
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def test_a_private_key_is_found_and_may_be_allowed(fresh, own_project):
    (own_project / "rootfs/etc/known.key").write_bytes(private_key())  # public: it is in the base
    (own_project / "fixtures").mkdir()
    (own_project / "fixtures/test.key").write_bytes(private_key())
    base = 'image = "./rootfs/"\ncpus = 1\nmemory = 128\noverlay = 1\n'
    smolfile = own_project / "Smolfile"
    smolfile.write_text(base + KEYS.format(allow=""))
    done = fresh("build", "-C", str(own_project), "-t", "keys", "--json")
    assert done.status == 3, done.stderr
    error = done.document("error")["error"]
    found = re.findall(r"a private key \((sha256:[0-9a-f]{16})\)", error["details"])
    assert len(set(found)) == 1
    assert "file /opt/fixtures/test.key, written by keys" in error["details"]
    assert f'allow = ["{found[0]}"]' in error["hint"]
    for allow in (f'"{found[0]}"', '"/opt/fixtures/"'):
        smolfile.write_text(base + KEYS.format(allow=allow))
        done = fresh("build", "-C", str(own_project), "-t", "keys", "--json")
        assert done.status == 0, done.stderr
