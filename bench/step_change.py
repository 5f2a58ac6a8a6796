"""What does it cost to change a late step? And what does an early one cost?

    .venv/bin/python bench/step_change.py [-n TIMES] [--memory MIB]

Builds a tiny machine (static busybox, ten steps of `true` work, a service and a health check), then
changes step 9, TIMES times, and says what each build took besides the steps themselves, phase by
phase; then once more with `resume = "disk"`, which boots, and with a changed first step. Needs
/bin/busybox (Debian's busybox-static). A home of its own, in the temporary directory, is used and
removed.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from measure import COMMAND_DEADLINE, SMOLBUILD, summary

STEPS = 10
HEAD = """\
image = "./rootfs/"
cpus = 1
memory = {memory}
overlay = 1

[smolbuild]
name = "bench/steps"
resume = "{resume}"

[[smolbuild.service]]
name = "web"
run = "exec httpd -f -p 8000 -h /"
ready = {{ port = 8000 }}

[smolbuild.health]
http = {{ port = 8000, path = "/step-{last}", contains = "step" }}
interval = "200ms"
"""
STEP = """
[[smolbuild.step]]
name = "step-{number}"
run = "dd if=/dev/urandom of=/data-{number} bs=1024 count=1024 && echo step {mark} > /step-{number}"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of a build besides its changed steps.")
    parser.add_argument("-n", "--times", type=int, default=5)
    parser.add_argument("--memory", type=int, default=256, metavar="MIB")
    options = parser.parse_args()
    for resume in ("memory", "disk"):
        with project() as (directory, environment):
            write(directory, options.memory, resume, changed={})
            first = build(directory, environment)
            print(f'\nresume = "{resume}": built from nothing in {first["seconds"]:.1f} s')
            for step in (9, 1):
                rounds = []
                for turn in range(options.times):
                    write(directory, options.memory, resume, changed={step: turn + 1})
                    rounds.append(build(directory, environment))
                report(f"step {step} of {STEPS} changed", rounds)


def report(title: str, rounds: list[dict]) -> None:
    besides = [(each["seconds"] - each["phases"].get("steps", 0.0)) * 1000 for each in rounds]
    print(summary(f"{title}: all but the steps", besides))
    names = list(dict.fromkeys(name for each in rounds for name in each["phases"]))
    medians = {n: statistics.median(e["phases"].get(n, 0.0) for e in rounds) for n in names}
    print("    seconds: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in medians.items()))


@contextlib.contextmanager
def project() -> Iterator[tuple[Path, dict[str, str]]]:
    with tempfile.TemporaryDirectory(prefix="smolbuild-bench-") as root:
        directory, home = Path(root) / "project", Path(root) / "home"
        binaries = directory / "rootfs" / "bin"
        binaries.mkdir(parents=True)
        shutil.copy("/bin/busybox", binaries / "busybox")
        for applet in ("sh", "dd", "echo", "httpd"):
            (binaries / applet).symlink_to("busybox")
        home.mkdir()
        yield directory, {**os.environ, "SMOLBUILD_HOME": str(home)}


def write(directory: Path, memory: int, resume: str, changed: dict[int, int]) -> None:
    text = HEAD.format(memory=memory, resume=resume, last=STEPS)
    for number in range(1, STEPS + 1):
        text += STEP.format(number=number, mark=changed.get(number, 0))
    (directory / "Smolfile").write_text(text)


def build(directory: Path, environment: dict[str, str]) -> dict:
    done = subprocess.run(
        [str(SMOLBUILD), "build", "-C", str(directory), "--json", "--progress", "none"],
        env=environment,
        capture_output=True,
        timeout=COMMAND_DEADLINE,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr.decode())
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
