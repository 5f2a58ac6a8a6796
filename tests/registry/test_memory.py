"""A stream far larger than the memory allowed for it."""

import json
import sys
import tempfile
from pathlib import Path

from testing_registry import docker_registry

from smolbuild.core.process import run

MIB = 1024 * 1024
BLOBS, SIZE = 64, 16 * MIB


def test_one_gibibyte_up_and_down_within_200_mib():
    with (
        tempfile.TemporaryDirectory() as directory,
        docker_registry(Path(directory)) as host,
    ):
        worker = Path(__file__).with_name("stream_worker.py")
        done = run([sys.executable, str(worker), host, str(BLOBS), str(SIZE)], timeout=240)
    assert done.status == 0, done.stderr.decode()
    seen = json.loads(done.stdout)
    assert seen["sent"] == seen["pulled"] == BLOBS * SIZE
    assert seen["received"] == 2 * BLOBS * SIZE
    assert 20 * MIB < seen["peak"] < 200 * MIB
