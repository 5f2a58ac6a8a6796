"""Builds that go on from the memory of the machine as it stood after a step, in real guests."""

import json
import re
import signal
import time

import pytest

SMOLFILE = """\
image = "./rootfs/"
cpus = 1
memory = 128
overlay = 1

[smolbuild]
name = "test/resumed"

[[smolbuild.step]]
name = "first"
run = "echo kept > /run/kept; echo one > /one; hostname"

[[smolbuild.step]]
name = "second"
run = "cat /run/kept /one; date +%s; hostname; echo run 1"

[[smolbuild.step]]
name = "third"
inputs = ["three.txt"]
run = "echo three > /three"

[[smolbuild.service]]
name = "web"
run = "exec httpd -f -p 8000 -h /"
ready = { port = 8000 }

[smolbuild.health]
http = { port = 8000, path = "/three", contains = "three" }
interval = "200ms"
"""


@pytest.fixture
def builds(fresh, own_project, smolbuild):
    """Give the function that builds the project in a home of its own, after an edit of its text."""
    (own_project / "Smolfile").write_text(SMOLFILE)
    (own_project / "three.txt").write_text("3\n")

    def build(old="", new="", *args, status=0):
        text = (own_project / "Smolfile").read_text()
        assert old in text
        (own_project / "Smolfile").write_text(text.replace(old, new) if old else text)
        done = fresh("build", "-C", str(own_project), "--json", "--progress", "json", *args)
        assert done.status == status, done.stderr
        events = [json.loads(line) for line in done.stderr.splitlines()]
        return events, json.loads(done.stdout) if status == 0 else None

    build.home, build.project, build.run = fresh.home, own_project, fresh
    return build


def cached(events):
    """Return which steps were taken from the cache, in order."""
    return [(e["name"], e["cached"]) for e in events if e["event"] == "StepStarted"]


def said_by(events, step):
    return "".join(e["data"] for e in events if e["event"] == "Output" and e["source"] == step)


def messages(events):
    return " ".join(e["text"] for e in events if e["event"] == "Message")


def entries(home):
    return sorted((home.cache / "steps").glob("[!.]*"), key=lambda path: path.stat().st_mtime)


def test_a_changed_step_goes_on_from_the_memory_after_the_step_before(builds):
    first, value = builds()
    assert "boot" in value["phases"]
    assert "resume" not in value["phases"]
    booted = builds.run.boots()

    events, value = builds("run 1", "run 2")
    assert cached(events) == [("first", True), ("second", False), ("third", False)]
    assert builds.run.boots() == booted
    assert "resume" in value["phases"]
    assert "boot" not in value["phases"]
    # What lived in memory only is there, the names are those of a machine that ran through, and
    # the clock is right.
    kept, one, date, hostname, *_ = said_by(events, "second").splitlines()
    assert (kept, one, hostname) == ("kept", "one", said_by(first, "first").strip())
    assert abs(int(date) - time.time()) < 60
    assert abs(int(date) - value["seconds"] - time.time()) < 60

    # Nothing but the services changed: they start in the machine as the last step left it.
    events, value = builds("httpd -f -p", "httpd -f -v -p")
    assert cached(events) == [("first", True), ("second", True), ("third", True)]
    assert builds.run.boots() == booted
    assert "steps" not in value["phases"]
    run = builds.run("run", "test/resumed", "--", "cat", "/three")
    assert (run.status, run.stdout) == (0, "three\n")

    # Of the old chain nothing but what stood before the first step is used.
    events, value = builds("echo one >", "echo  one >")
    assert [is_cached for _, is_cached in cached(events)] == [False, False, False]
    assert builds.run.boots() == booted

    events, value = builds("memory = 128", "memory = 136")
    assert builds.run.boots() == booted + 1
    assert "boot" in value["phases"]


def test_memory_that_does_not_restore_is_said_and_the_disk_boots(builds):
    builds()
    for entry in entries(builds.home):
        state = (entry / "state").read_bytes()
        (entry / "state").write_bytes(bytes(len(state)))
    # The third step needs the disk only; the second one would miss what was in memory.
    events, value = builds("echo three", "echo  three")
    assert cached(events)[:2] == [("first", True), ("second", True)]
    assert "does not restore, booting from its disk" in messages(events)
    assert "boot" in value["phases"]
    again, value = builds("echo  three", "echo   three")
    assert "does not restore" not in messages(again)  # it was let go


def test_only_disks_are_kept_where_the_smolfile_says_so(builds):
    builds('name = "test/resumed"', 'name = "test/resumed"\nresume = "disk"')
    assert all(not (entry / "memory").exists() for entry in entries(builds.home))
    booted = builds.run.boots()
    events, value = builds("echo three", "echo  three")
    assert cached(events) == [("first", True), ("second", True), ("third", False)]
    assert builds.run.boots() == booted + 1
    assert "resume" not in value["phases"]


def test_the_cache_is_listed_pruned_and_kept_within_its_size(builds):
    builds()
    value = builds.run("cache", "ls", "--json").document("cache-ls")
    assert {step["step"] for step in value["steps"]} == {"copy", "first", "second", "third"}
    assert {step["artifact"] for step in value["steps"]} == {"test/resumed"}
    assert value["bytes"] == sum(s["diskBytes"] + s["memoryBytes"] for s in value["steps"])
    assert all(step["memoryBytes"] > 1 << 20 for step in value["steps"])
    assert "base" in value["others"]
    text = builds.run("cache", "ls").stdout
    assert re.search(r"test/resumed +third +[\d.]+ MB +[\d.]+ MB", text)

    small = value["bytes"] // 2
    said = builds.run("cache", "prune", "--max-size", str(small), "--dry-run", "--json")
    would = said.document("cache-prune")
    assert would["dryRun"]
    assert 0 < would["left"] <= small
    assert builds.run("cache", "ls", "--json").document("cache-ls")["bytes"] == value["bytes"]
    done = builds.run("cache", "prune", "--max-size", str(small), "--json").document("cache-prune")
    assert (done["freed"], done["left"]) == (would["freed"], would["left"])

    # The cap of the Smolfile holds after the build, and a build works without what is gone.
    builds("[smolbuild]\n", '[smolbuild]\ncache = { max_size = "1MiB" }\n')
    builds("echo three", "echo  three")
    assert builds.run("cache", "ls", "--json").document("cache-ls")["bytes"] <= 1 << 20

    assert builds.run("cache", "prune", "--all").status == 0
    assert entries(builds.home) == []
    assert builds.run("cache", "prune", "--all", "--max-size", "1GiB").status == 2
    wrong = builds.run("cache", "prune", "--max-size", "much")
    assert wrong.status == 2
    assert "20GiB" in wrong.stderr


def test_a_build_whose_predecessor_is_killed_takes_over(builds):
    # The first one stays in its last step until it is killed; the second waits, and finds the
    # file that lets it through.
    (builds.project / "Smolfile").write_text(
        SMOLFILE.replace("echo three > /three", "echo three > /three; sleep 3")
    )
    args = ("build", "-C", str(builds.project), "--progress", "plain")
    first = builds.run.start(*args)
    until_said(first, "step 3/3 third")
    second = builds.run.start(*args)
    until_said(second, "waiting for it")
    first.send_signal(signal.SIGKILL)
    first.wait(30)
    out, err = second.communicate(timeout=200)
    assert second.returncode == 0, err
    assert "built, proven and signed" in out
    # What the dead one had finished is not run again.
    assert "step 1/3 first: cached" in err
    assert "step 2/3 second: cached" in err
    assert builds.run.machines() == []
    for stream in (first.stdout, first.stderr):
        stream.close()
    third = builds.run("build", "-C", str(builds.project))
    assert "reused (nothing changed)" in third.stdout


def until_said(process, text):
    """Read the process's standard error until a line holds ``text``."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return
    pytest.fail(f"it never said {text!r}: {''.join(lines)}")
