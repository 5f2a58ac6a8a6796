"""Guests that misbehave: what a build says of them, and what it leaves."""

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
