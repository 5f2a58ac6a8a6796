"""Push, pull and verify through the command line, against a real and a misbehaving registry."""

import json
import shutil
from pathlib import Path

import pytest
from testing_registry import FakeRegistry, docker_registry
from testing_registry import status as status_answer

from smolbuild.core.process import run


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    with docker_registry(Path(tmp_path_factory.mktemp("cli-registry"))) as host:
        yield host


@pytest.fixture(scope="module")
def pushed(smolbuild, built, registry):
    done = smolbuild("push", "tiny:v1", f"{registry}/demo/tiny:v1", "--json")
    assert done.status == 0, done.stderr
    value = done.document("push")
    assert value["digest"] == built["digest"]
    assert value["bytes_pushed"] > 1_000_000
    return value


def trust(worker, smolbuild, name: str = "publisher") -> None:
    shutil.copy(smolbuild.home.keys / "default.pub", worker.home.keys / f"{name}.pub")


def test_a_worker_pulls_by_digest_and_forks(smolbuild, built, pushed, registry, fresh):
    trust(fresh, smolbuild)
    reference = f"{registry}/demo/tiny@{built['digest']}"
    done = fresh("pull", reference, "--json")
    assert done.status == 0, done.stderr
    value = done.document("pull")
    assert value["digest"] == built["digest"]
    assert value["key"] == built["key"]
    assert value["bytes_pulled"] > 1_000_000
    out = fresh("run", reference, "--", "sh", "-c", "cat /one /srv/two.txt")
    assert (out.status, out.stdout) == (0, "one\ntwo\n"), out.stderr
    again = fresh("pull", reference, "--json").document("pull")
    assert again["bytes_pulled"] == 0
    checks = fresh("verify", reference, "--json").document("verify")
    assert checks["where"] == "store"
    rows = fresh("ls", "--json").document("ls")["artifacts"]
    assert [row["name"] for row in rows] == [reference]


def test_pushing_again_sends_nothing(smolbuild, pushed, registry):
    done = smolbuild("push", "tiny:v1", f"{registry}/demo/tiny:v1", "--json")
    assert done.document("push")["bytes_pushed"] == 0


def test_build_push_in_one_command(smolbuild, built, project, registry):
    done = smolbuild(
        "build", "-C", str(project), "-t", "tiny:v1", "--push", f"{registry}/one/go:v2", "--json"
    )
    value = done.document("build")
    assert value["pushed"]["digest"] == built["digest"]
    checks = smolbuild("verify", f"{registry}/one/go:v2", "--json").document("verify")
    assert checks["digest"] == built["digest"]
    assert checks["where"] == registry


def test_verify_says_each_check(smolbuild, pushed, registry):
    text = smolbuild("verify", "tiny:v1")
    assert text.status == 0
    assert text.stdout.count("ok  ") == 4


def nothing_of(worker) -> None:
    assert list(worker.home.materialised.glob("[!.]*")) == []
    assert worker("ls", "--json").document("ls") == {"artifacts": []}


def test_without_keys_nothing_is_pulled(pushed, registry, fresh):
    done = fresh("pull", f"{registry}/demo/tiny:v1", "--json")
    assert done.status == 4
    assert done.document("error")["error"]["code"] == "no-keys"
    nothing_of(fresh)


def test_a_wrong_key_is_told_apart_from_no_signature(pushed, registry, fresh):
    fresh("key", "generate")
    done = fresh("pull", f"{registry}/demo/tiny:v1", "--json")
    assert done.status == 4
    assert done.document("error")["error"]["code"] == "wrong-key"
    nothing_of(fresh)


def test_an_unsigned_copy_is_refused(smolbuild, built, pushed, registry, fresh):
    trust(fresh, smolbuild)
    copied = run(
        [
            "skopeo", "copy", "--all", "--preserve-digests", "--src-tls-verify=false",
            "--dest-tls-verify=false", f"docker://{registry}/demo/tiny:v1",
            f"docker://{registry}/unsigned/tiny:v1",
        ],
        timeout=120,
    )  # fmt: skip
    assert copied.status == 0, copied.stderr
    done = fresh("pull", f"{registry}/unsigned/tiny:v1", "--json")
    assert done.status == 4
    assert done.document("error")["error"]["code"] == "unsigned"
    nothing_of(fresh)


def test_a_tampered_blob_in_the_registry_materialises_nothing(smolbuild, built, fresh, tmp_path):
    trust(fresh, smolbuild)
    with docker_registry(tmp_path) as host:
        assert smolbuild("push", "tiny:v1", f"{host}/evil/tiny:v1").status == 0
        blobs = [path for path in tmp_path.rglob("data") if path.stat().st_size > 100_000]
        victim = max(blobs, key=lambda path: path.stat().st_size)
        raw = bytearray(victim.read_bytes())
        raw[len(raw) // 2] ^= 1
        victim.write_bytes(raw)
        done = fresh("pull", f"{host}/evil/tiny:v1", "--json")
    assert done.status == 4, done.stderr
    nothing_of(fresh)


def test_a_tampered_local_blob_is_found_by_verify(smolbuild, built, pushed, registry, fresh):
    trust(fresh, smolbuild)
    reference = f"{registry}/demo/tiny:v1"
    assert fresh("pull", reference).status == 0
    assert fresh("verify", reference).status == 0
    blobs = sorted(
        (fresh.home.store / "blobs" / "sha256").iterdir(), key=lambda p: p.stat().st_size
    )
    raw = bytearray(blobs[-1].read_bytes())
    raw[7] ^= 1
    blobs[-1].write_bytes(raw)
    done = fresh("verify", reference)
    assert done.status == 4
    assert "damaged" in done.stderr


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
def test_a_registry_that_refuses_is_exit_5_and_costs_nothing_local(
    smolbuild, built, status, tmp_path
):
    with FakeRegistry() as broken:
        broken.fail("*", ".*", status_answer(status), times=1000)
        done = smolbuild("push", "tiny:v1", f"{broken.host}/x/tiny:v1", "--json")
    assert done.status == 5, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["hint"]
    assert smolbuild("verify", "tiny:v1").status == 0


def test_a_base_image_from_a_registry_is_resolved_into_the_lock(
    smolbuild, own_project, registry, tmp_path
):
    layout = tmp_path / "layout"
    made = run(["umoci", "init", "--layout", str(layout)], timeout=60)
    assert made.status == 0, made.stderr
    image = f"{layout}:base"
    for argv in (
        ["umoci", "new", "--image", image],
        ["umoci", "insert", "--rootless", "--image", image, str(own_project / "rootfs"), "/"],
        ["umoci", "config", "--image", image, "--config.env", "FROM_IMAGE=yes",
         "--config.workingdir", "/srv"],
        ["skopeo", "copy", "--dest-tls-verify=false", f"oci:{image}",
         f"docker://{registry}/library/base:1"],
    ):  # fmt: skip
        done = run(argv, timeout=60)
        assert done.status == 0, done.stderr
    (own_project / "Smolfile").write_text(
        f'image = "{registry}/library/base:1"\ncpus = 1\nmemory = 128\noverlay = 1\n'
        'init = ["mkdir -p /srv && pwd > /where"]\n'
    )
    built = smolbuild("build", "-C", str(own_project), "-t", "from-registry:v1", "--json")
    assert built.status == 0, built.stderr
    lock = (own_project / "Smolfile.lock").read_text()
    digest = run(
        ["skopeo", "inspect", "--tls-verify=false", "--format", "{{.Digest}}",
         f"docker://{registry}/library/base:1"],
        timeout=60,
    )  # fmt: skip
    assert digest.stdout.decode().strip() in lock
    out = smolbuild("run", "from-registry:v1", "--", "sh", "-c", "pwd; echo $FROM_IMAGE")
    assert out.stdout == "/srv\nyes\n", out.stderr
