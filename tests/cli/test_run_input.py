"""Standard input of ``smolbuild run -i``: passed on as it comes, and never waited for."""

import subprocess
import sys


def test_input_that_does_not_end_is_passed_on_and_not_waited_for(smolbuild, built):
    process = subprocess.Popen(
        [sys.executable, "-m", "smolbuild.cli", "run", built["digest"], "-i", "--",
         "sh", "-c", "read line; echo got $line; exit 5"],
        env=smolbuild.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        process.stdin.write(b"hello\n")
        process.stdin.flush()  # and it stays open
        status = process.wait(timeout=120)
        out, err = process.stdout.read(), process.stderr.read()
    finally:
        process.kill()
        process.communicate()
    assert out == b"got hello\n"
    assert status == 5, err
    assert b"Fatal" not in err
