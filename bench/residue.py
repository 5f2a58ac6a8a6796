"""How fast is the residue scan on a core, on real memory images and disks?

    .venv/bin/python bench/residue.py FILE … [-n TIMES] [-s SECRETS]

FILE is a memory image or disk of a materialised artifact (``materialised/*/memory.raw`` in
SMOLBUILD_HOME). Searched for are the pieces of so many secrets of 40 letters, in all their forms,
and all token shapes: first on one core, then on all.
"""

import argparse
import os
import secrets
import statistics
import tempfile
import time
from pathlib import Path

from smolbuild.residue.media import Medium, file_medium
from smolbuild.residue.scanner import Scanner
from smolbuild.residue.search import search


def seconds(scanner: Scanner, media: list[Medium], values: dict[str, bytes], times: int) -> float:
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        search(scanner, media, values)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the residue scan.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-n", "--times", type=int, default=5)
    parser.add_argument("-s", "--secrets", type=int, default=3)
    options = parser.parse_args()
    media = [file_medium(path, "memory") for path in options.files]
    size = sum(segment.length for medium in media for segment in medium.segments)
    values = {f"S{n}": secrets.token_urlsafe(30).encode() for n in range(options.secrets)}
    with tempfile.TemporaryDirectory() as cache:
        for workers in (1, len(os.sched_getaffinity(0))):
            scanner = Scanner(Path(cache), workers=workers)
            search(scanner, media, values)  # brings the files into the page cache
            took = seconds(scanner, media, values, options.times)
            print(
                f"{workers} core(s): {size / 2**20:,.0f} MiB in {took:.2f} s, "
                f"{size / 2**20 / took:,.0f} MiB/s (median of {options.times})"
            )


if __name__ == "__main__":
    main()
