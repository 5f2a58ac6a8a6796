"""Guests that misbehave: what a build says of them, and what it leaves."""

import json

import pytest


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo c > /proc/sysrq-trigger; sleep 60", ["step two", "Kernel panic", "Smolfile:19"]),
        ("echo o > /proc/sysrq-trigger; sleep 60", ["step two", "Power down", "Smolfile:19"]),
    ],
    ids=["panic", "power-off"],
)
def test_a_step_that_takes_the_machine_down_is_named_with_the_console(
    smolbuild, built, project, own_project, command, words
):
    (own_project / "Smolfile.lock").write_bytes((project / "Smolfile.lock").read_bytes())
    path = own_project / "Smolfile"
    path.write_text(path.read_text().replace("cat /srv/two.txt > /two", command))
    done = smolbuild("build", "-C", str(own_project), "-t", "tiny:bad", "--json")
    assert done.status == 1, done.stderr
    error = done.document("error")["error"]
    for word in words:
        assert word in error["message"] + error["details"]
    assert smolbuild.machines() == []
    assert list(smolbuild.home.run.iterdir()) == []


def test_an_artifact_of_which_a_blob_is_gone_is_built_again(fresh, own_project):
    first = fresh("build", "-C", str(own_project), "-t", "tiny:v1", "--json").document("build")
    manifest = fresh.home.store / "blobs" / "sha256" / first["manifest"].removeprefix("sha256:")
    layer = json.loads(manifest.read_text())["layers"][-1]["digest"]
    (fresh.home.store / "blobs" / "sha256" / layer.removeprefix("sha256:")).unlink()
    assert fresh("plan", "-C", str(own_project), "--json").document("plan")["artifact"] is None
    second = fresh("build", "-C", str(own_project), "-t", "tiny:v1", "--json").document("build")
    assert not second["reused"]
    assert fresh("verify", "tiny:v1", "--json").status == 0
    assert fresh("run", "tiny:v1", "--", "cat", "/two").stdout == "two\n"
