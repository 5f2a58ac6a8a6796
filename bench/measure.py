"""What the benchmarks share: run a command, keep its wall time, say the spread."""

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SMOLBUILD = Path(sys.executable).parent / "smolbuild"
COMMAND_DEADLINE = 300.0


def timed(*arguments: str) -> tuple[float, Any]:
    """Run smolbuild once; return the wall time in milliseconds and the JSON it printed, if any."""
    started = time.perf_counter()
    ended = subprocess.run(
        [str(SMOLBUILD), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=COMMAND_DEADLINE,
        check=False,
    )
    elapsed = (time.perf_counter() - started) * 1000
    if ended.returncode != 0:
        sys.stderr.write(ended.stderr.decode(errors="replace"))
        raise SystemExit(f"smolbuild {' '.join(arguments)} failed with {ended.returncode}")
    return elapsed, json.loads(ended.stdout) if "--json" in arguments else None


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(share * len(ordered), 6)) - 1)]


def summary(what: str, values: Sequence[float]) -> str:
    """Return one line: median, p95, smallest and largest, in milliseconds."""
    middle, high = statistics.median(values), percentile(values, 0.95)
    return (
        f"{what:<28} median {middle:8.1f} ms   p95 {high:8.1f}"
        f"   min {min(values):8.1f}   max {max(values):8.1f}   n {len(values)}"
    )
