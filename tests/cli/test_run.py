"""``smolbuild run`` when it is interrupted, fed nonsense, or flooded."""

import signal
import subprocess

import pytest


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_forks_at_once(smolbuild, built, number, status):
    process = smolbuild.start(
        "run", built["digest"], "-n", "3", "--", "sh", "-c", "echo here; sleep 300"
    )
    try:
        for _ in range(3):
            assert "here" in process.stdout.readline()
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == status
    assert "Traceback" not in errors
    assert smolbuild.machines() == []
    assert list(smolbuild.home.run.iterdir()) == []


@pytest.mark.parametrize("timeout", ["nan", "inf", "-1", "0"])
def test_a_timeout_out_of_range_is_a_usage_error(smolbuild, built, timeout):
    done = smolbuild("run", built["digest"], "--timeout", timeout, "--json", "--", "true")
    assert done.status == 2
    assert "timeout" in done.document("error")["error"]["message"]


def test_a_line_without_end_from_several_forks_passes_in_pieces(smolbuild, built):
    command = "dd if=/dev/zero bs=64k count=512 | tr '\\0' x"
    process = smolbuild.start("run", built["digest"], "-n", "2", "--", "sh", "-c", command)
    try:
        out, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0
    assert out.count("x") == 2 * (32 << 20)
