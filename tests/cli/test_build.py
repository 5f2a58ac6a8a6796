"""The main job through the command line, on a tiny real machine."""

import json
import os
import shutil
import signal
import time

import pytest

from smolbuild.core.process import run


def edit(project, old: str, new: str) -> None:
    path = project / "Smolfile"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_build_is_proven_in_two_different_forks(built):
    assert not built["reused"]
    first, second = built["proofs"]
    for what in ("machineId", "bootId", "randomSha256"):
        assert first[what] != second[what]
    assert max(first["clockErrorMs"], second["clockErrorMs"]) < 1000
    assert {"boot", "steps", "ready", "health", "checkpoint", "pack", "proof", "sign"} <= set(
        built["phases"]
    )


def test_nothing_changed_starts_no_qemu(smolbuild, project, built):
    before = smolbuild.starts()
    again = smolbuild("build", "-C", str(project), "-t", "tiny:v1", "--json")
    assert again.status == 0, again.stderr
    value = again.document("build")
    assert value["reused"]
    assert value["digest"] == built["digest"]
    assert smolbuild.starts() == before
    text = smolbuild("build", "-C", str(project), "-t", "tiny:again")
    assert "reused (nothing changed)" in text.stdout
    assert built["digest"] in text.stdout


def test_plan_says_what_would_run_and_why(smolbuild, project, built, own_project):
    value = smolbuild("plan", "-C", str(project), "--json").document("plan")
    assert value["key"] == built["key"]
    assert value["artifact"] == built["digest"]
    (own_project / "Smolfile.lock").write_bytes((project / "Smolfile.lock").read_bytes())
    (own_project / "two.txt").write_text("two\nchanged\n")
    before = smolbuild.starts()
    value = smolbuild("plan", "-C", str(own_project), "--json").document("plan")
    assert smolbuild.starts() == before
    assert value["artifact"] is None
    one, two = value["steps"]
    assert (one["state"], two["state"]) == ("cached", "will run")
    assert "two.txt" in two["why"]
    (change,) = value["changes"]
    assert (change["leaf"], change["steps"]) == ("file two.txt", ["two"])
    assert change["text"].endswith(" (line 2 added)")
    assert value["against"] == built["digest"]
    text = smolbuild("plan", "-C", str(own_project))
    assert "will run" in text.stdout
    assert "runs again: two" in text.stdout


def test_plan_compares_with_any_local_artifact(smolbuild, project, built, own_project):
    (own_project / "Smolfile.lock").write_bytes((project / "Smolfile.lock").read_bytes())
    smolfile = (own_project / "Smolfile").read_text().replace("test/tiny", "test/another")
    (own_project / "Smolfile").write_text(smolfile.replace("retries = 5", "retries = 6"))
    value = smolbuild("plan", "-C", str(own_project), "--json").document("plan")
    assert (value["changes"], value["against"]) == (None, None)
    for name in ("tiny:v1", built["digest"]):
        args = ("plan", "-C", str(own_project), "--against", name)
        value = smolbuild(*args, "--json").document("plan")
        assert [change["text"] for change in value["changes"]] == ["health: retries 5 -> 6"]
        assert value["changes"][0]["steps"] == []
        assert [step["state"] for step in value["steps"]] == ["cached", "cached"]
        text = smolbuild(*args).stdout
        assert f"changed since {name}\n  health: retries 5 -> 6" in text
        assert "no step runs again" in text
    same = smolbuild("plan", "-C", str(project), "--against", "tiny:v1")
    assert "nothing changed since tiny:v1" in same.stdout
    missing = smolbuild("plan", "-C", str(project), "--against", "nothing:here")
    assert missing.status == 2


@pytest.fixture(scope="module")
def other(smolbuild, project, built, tmp_path_factory):
    """Give how a build of the project went in which a late file and a service are otherwise."""
    directory = tmp_path_factory.mktemp("other") / "project"
    shutil.copytree(project, directory, symlinks=True)
    (directory / "two.txt").write_text("other\n")
    smolfile = (directory / "Smolfile").read_text()
    (directory / "Smolfile").write_text(smolfile.replace("httpd -f -p", "httpd -f -v -p"))
    done = smolbuild(
        "build", "-C", str(directory), "-t", "tiny:other", "--json", "--progress", "json"
    )
    assert done.status == 0, done.stderr
    return done


def test_a_changed_late_input_runs_only_the_late_step(smolbuild, other):
    why = other.document("build")["why"]
    assert {change["leaf"]: change["steps"] for change in why["changes"]} == {
        "service web": [],
        "file two.txt": ["two"],
    }
    events = [json.loads(line) for line in other.stderr.splitlines()]
    steps = {e["name"]: e["cached"] for e in events if e["event"] == "StepStarted"}
    assert steps == {"one": True, "two": False}
    assert any("two.txt: content" in e.get("text", "") for e in events)
    out = smolbuild("run", "tiny:other", "--", "cat", "/one", "/two")
    assert (out.status, out.stdout) == (0, "one\nother\n"), out.stderr


def test_diff_says_what_two_artifacts_differ_in(smolbuild, built, other):
    before = smolbuild.starts()
    done = smolbuild("diff", "tiny:v1", "tiny:other", "--files", "--json")
    assert done.status == 0, done.stderr
    value = done.document("diff")
    assert [change["leaf"] for change in value["inputs"]] == ["service web", "file two.txt"]
    assert value["inputs"][1]["text"].endswith("(line 1 changed)")
    changes = {change["path"]: change for change in value["files"]["changes"]}
    assert changes["/two"]["what"] == ["content (4 -> 6 bytes)"]
    assert changes["/srv/two.txt"]["kind"] == "changed"
    assert "/one" not in changes
    assert "/bin/busybox" not in changes
    assert [process["argv"][2] for process in value["processes"]["old"]] == ["-p"]
    assert [process["argv"][2] for process in value["processes"]["new"]] == ["-v"]
    assert value["ports"] == {"old": [], "new": []}
    assert len(value["new"]["ready_ms"]) == 2
    assert 0 < value["sharedBytes"] < value["new"]["sizes"]["packed"]
    text = smolbuild("diff", "tiny:v1", built["digest"]).stdout
    assert text == "nothing differs\n"
    text = smolbuild("diff", "tiny:other", "tiny:v1").stdout
    for line in ("two.txt: content", "~ /two: content (6 -> 4 bytes)", "time to ready"):
        assert line in text, text
    assert smolbuild.starts() == before
    assert smolbuild("diff", "tiny:v1", "nothing:here").status == 2


def test_run_passes_output_and_status_through(smolbuild, built):
    done = smolbuild("run", "tiny:v1", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert done.status == 7
    assert done.stdout == "out\n"
    assert "err\n" in done.stderr
    env = smolbuild("run", "tiny:v1", "--", "sh", "-c", "echo $GREETING; id -u; cat /srv/two.txt")
    assert env.stdout == "hello\n0\ntwo\n"
    piped = smolbuild("run", "tiny:v1", "-i", "--", "sh", "-c", "wc -c", stdin="x" * 100_000)
    assert piped.stdout.strip() == "100000"
    missing = smolbuild("run", "tiny:v1", "--", "no-such-program")
    assert missing.status == 127
    assert smolbuild.machines() == []


def test_forks_are_different_machines(smolbuild, built):
    done = smolbuild(
        "run", "tiny:v1", "-n", "3", "--json", "--",
        "sh", "-c", "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id; date +%s",
    )  # fmt: skip
    forks = done.document("run")["forks"]
    assert done.status == 0
    assert len({fork["id"] for fork in forks}) == 3
    lines = [fork["stdout"].splitlines() for fork in forks]
    for place in range(3):
        assert len({line[place] for line in lines}) == 3, lines
    assert [line[0] for line in lines] == [fork["id"] for fork in forks]
    assert all(abs(int(line[3]) - time.time()) < 60 for line in lines)
    assert all(fork["how"] == "restored" and fork["ready_ms"] > 0 for fork in forks)


def test_what_a_fork_writes_is_gone(smolbuild, built):
    smolbuild("run", "tiny:v1", "--", "sh", "-c", "echo x > /mark; sync")
    done = smolbuild("run", "tiny:v1", "--", "ls", "/mark")
    assert done.status != 0
    assert list(smolbuild.home.run.iterdir()) == []


def test_ls_inspect_and_a_foreign_reader(smolbuild, built):
    rows = smolbuild("ls", "--json").document("ls")["artifacts"]
    assert any(row["name"] == "tiny:v1" and row["digest"] == built["digest"] for row in rows)
    value = smolbuild("inspect", "tiny:v1", "--json").document("inspect")
    assert value["key"] == built["key"]
    assert [service["name"] for service in value["services"]] == ["web"]
    assert len(value["referrers"]) == 4
    assert value["base"]["kind"] == "local"
    assert value["base"]["reference"] == "./rootfs/"
    (process,) = value["results"]["processes"]
    assert process["argv"][0] == "httpd"
    assert (process["service"], process["user"], process["count"]) == ("web", "root", 1)
    (port,) = value["results"]["ports"]
    assert (port["protocol"], port["port"], port["service"]) == ("tcp", 8000, "web")
    text = smolbuild("inspect", "tiny:v1").stdout
    assert "process    root httpd -f -p 8000 -h /srv/www [web]" in text
    assert ":8000 " in text
    assert built["key"] in smolbuild("inspect", built["digest"][:20]).stdout
    raw = run(["skopeo", "inspect", "--raw", f"oci:{smolbuild.home.store}:tiny:v1"], timeout=60)
    assert raw.status == 0, raw.stderr
    assert json.loads(raw.stdout)["manifests"][0]["digest"] == built["manifest"]


@pytest.mark.parametrize(
    ("old", "new", "status", "words"),
    [
        (
            'run = "cat /srv/two.txt > /two"',
            'run = "echo last words; exit 9"',
            1,
            ["step two", "status 9", "last words", "Smolfile:19"],
        ),
        (
            'run = "cat /srv/two.txt > /two"',
            'run = "echo waiting; sleep 60"\ntimeout = "1s"',
            1,
            ["step two", "did not end within 1 s", "waiting"],
        ),
        (
            'run = "cat /srv/two.txt > /two"',
            """run = "echo \\"wget: bad address 'a.example'\\"; exit 1\"""",
            1,
            ["step two", "the network is off for this step", "net = true"],
        ),
        (
            'run = "exec httpd -f -p 8000 -h /srv/www"',
            'run = "echo never mind; sleep 60"\nready_timeout = "2s"',
            3,
            ["service web", "not ready", "port 127.0.0.1:8000", "never mind"],
        ),
        (
            'run = "exec httpd -f -p 8000 -h /srv/www"',
            'run = "echo bye; exit 4"',
            3,
            ["service web", "status 4", "bye"],
        ),
        (
            'run = "exec httpd -f -p 8000 -h /srv/www"',
            'run = "httpd -p 8000 -h /srv/www"',
            3,
            ["service web", "status 0", "must stay in the foreground"],
        ),
        (
            'run = "exec httpd -f -p 8000 -h /srv/www"',
            'run = "exec htpd -f"',
            3,
            ["service web", "status 127", "has no such program"],
        ),
        (
            'contains = "it works"',
            'contains = "something else"',
            3,
            ["health check failed 5 times", "something else"],
        ),
    ],
    ids=[
        "step-fails",
        "step-hangs",
        "step-lacks-network",
        "never-ready",
        "service-ends",
        "service-in-background",
        "service-mistyped",
        "unhealthy",
    ],
)
def test_failures_say_what_and_leave_no_artifact(
    smolbuild, built, project, own_project, old, new, status, words
):
    (own_project / "Smolfile.lock").write_bytes((project / "Smolfile.lock").read_bytes())
    edit(own_project, old, new)
    done = smolbuild("build", "-C", str(own_project), "-t", "tiny:bad", "--json")
    assert done.status == status, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert done.document("error")["error"]["exitStatus"] == status
    rows = smolbuild("ls", "--json").document("ls")["artifacts"]
    assert "tiny:bad" not in [row["name"] for row in rows]
    assert smolbuild.machines() == []
    assert list(smolbuild.home.run.iterdir()) == []
    steps = smolbuild("plan", "-C", str(own_project), "--json").document("plan")["steps"]
    assert steps[0]["state"] == "cached"


def test_locked_needs_a_lock_that_fits(smolbuild, built, project, own_project):
    missing = smolbuild("build", "-C", str(own_project), "--locked")
    assert missing.status == 2
    assert "Smolfile.lock" in missing.stderr
    fits = smolbuild("build", "-C", str(project), "--locked", "-t", "tiny:v1", "--json")
    assert fits.document("build")["reused"]


def test_rm_frees_what_only_that_artifact_needed(smolbuild, built, own_project, project):
    (own_project / "Smolfile.lock").write_bytes((project / "Smolfile.lock").read_bytes())
    (own_project / "www" / "index.html").write_text("it works, for a while\n")
    made = smolbuild("build", "-C", str(own_project), "-t", "gone:v1", "--json").document("build")
    materialised = smolbuild.home.materialised / made["manifest"][7:]
    assert materialised.is_dir()
    removed = smolbuild("rm", "gone:v1", "--json").document("rm")
    assert removed["removed"] == ["gone:v1"]
    assert removed["freedBytes"] > 0
    assert not materialised.exists()
    assert smolbuild("run", "gone:v1").status == 2
    assert smolbuild("run", "tiny:v1", "--", "true").status == 0


PHASES = ("base", "resume", "steps", "ready", "checkpoint", "pack", "proof")


@pytest.mark.parametrize("phase", PHASES)
def test_kill_9_in_any_phase_leaves_nothing_and_the_next_build_works(
    smolbuild, built, project, own_project, phase
):
    (own_project / "Smolfile.lock").write_bytes((project / "Smolfile.lock").read_bytes())
    (own_project / "two.txt").write_text(f"killed in {phase}\n")
    arguments = ("build", "-C", str(own_project), "-t", f"killed:{phase}", "--json")
    process = smolbuild.start(*arguments, "--progress", "json")
    assert process.stderr is not None
    try:
        for line in process.stderr:
            event = json.loads(line)
            if event["event"] == "PhaseStarted" and event["phase"] == phase:
                break
        else:
            pytest.fail(f"phase {phase} never came")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()
        process.stderr.close()
    deadline = time.monotonic() + 10
    while smolbuild.machines() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert smolbuild.machines() == []
    rows = smolbuild("ls", "--json").document("ls")["artifacts"]
    assert f"killed:{phase}" not in [row["name"] for row in rows]
    assert list(smolbuild.home.run.iterdir()) == []
    done = smolbuild(*arguments)
    assert done.status == 0, done.stderr
    assert smolbuild("rm", f"killed:{phase}").status == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_build_cleanly(smolbuild, built, project, own_project, number, status):
    (own_project / "Smolfile.lock").write_bytes((project / "Smolfile.lock").read_bytes())
    edit(own_project, 'run = "cat /srv/two.txt > /two"', 'run = "echo started; sleep 100"')
    process = smolbuild.start("build", "-C", str(own_project), "-t", "signal:v1")
    assert process.stderr is not None
    try:
        assert any("started" in line for line in process.stderr)
        process.send_signal(number)
        assert process.wait(20) == status
        rest = process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        assert process.stdout is not None
        process.stdout.close()
    assert "Traceback" not in rest
    assert smolbuild.machines() == []
    assert list(smolbuild.home.run.iterdir()) == []


def test_two_builds_of_one_key_share_the_result(smolbuild, built, project, own_project):
    (own_project / "Smolfile.lock").write_bytes((project / "Smolfile.lock").read_bytes())
    (own_project / "two.txt").write_text("both\n")
    both = [
        smolbuild.start("build", "-C", str(own_project), "-t", f"both:v{n}", "--json")
        for n in (1, 2)
    ]
    values = []
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        values.append(json.loads(out))
    assert values[0]["digest"] == values[1]["digest"]
    assert sorted(value["reused"] for value in values) == [False, True]


def test_no_cache_builds_anew_and_what_lost_its_name_can_be_removed(
    smolbuild, built, project, own_project
):
    (own_project / "Smolfile.lock").write_bytes((project / "Smolfile.lock").read_bytes())
    (own_project / "two.txt").write_text("anew\n")
    arguments = ("build", "-C", str(own_project), "-t", "anew:v1", "--json")
    first = smolbuild(*arguments).document("build")
    again = smolbuild(*arguments, "--no-cache").document("build")
    assert not again["reused"]
    assert again["key"] == first["key"]
    assert again["digest"] != first["digest"]
    (own_project / "two.txt").write_text("anew once more\n")
    last = smolbuild(*arguments).document("build")
    listed = smolbuild("ls", "--all", "--json").document("ls")["artifacts"]
    names = {row["digest"]: row["name"] for row in listed}
    assert names[last["digest"]] == "anew:v1"
    assert names[again["digest"]] == "-"
    removed = smolbuild("rm", again["digest"][:20], "--json").document("rm")
    assert removed["freedBytes"] > 0
    assert smolbuild("rm", "anew:v1").status == 0


def test_the_home_is_private(smolbuild, built):
    for directory in ("store", "materialised", "cache", "keys", "run", "locks"):
        assert (smolbuild.home.root / directory).stat().st_mode & 0o077 == 0
    for key in smolbuild.home.keys.glob("*.pem"):
        assert key.stat().st_mode & 0o777 == 0o600
    assert (smolbuild.home.materialised / built["manifest"][7:]).stat().st_mode & 0o077 == 0


def test_a_changed_local_base_renews_the_lock_but_not_under_locked(
    smolbuild, built, project, own_project
):
    lock = own_project / "Smolfile.lock"
    lock.write_bytes((project / "Smolfile.lock").read_bytes())
    (own_project / "rootfs" / "new").write_text("more")
    refused = smolbuild("plan", "-C", str(own_project), "--locked", "--json")
    assert refused.status == 2
    assert refused.document("error")["error"]["code"] == "lock-mismatch"
    before = lock.read_bytes()
    value = smolbuild("plan", "-C", str(own_project), "--json").document("plan")
    assert value["lock"]["state"] == "updated"
    assert lock.read_bytes() != before
    assert smolbuild("plan", "-C", str(own_project), "--locked").status == 0


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_lock_that_is_no_file_is_said_and_not_waited_for(smolbuild, own_project, make):
    make(own_project / "Smolfile.lock")
    done = smolbuild("plan", "-C", str(own_project), "--json")
    assert done.status == 2
    assert "Smolfile.lock is not a regular file" in done.document("error")["error"]["message"]
