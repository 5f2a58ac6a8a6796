"""How long does `smolbuild build` take when nothing changed, and `smolbuild --version`?

    .venv/bin/python bench/noop_build.py [DIRECTORY] [-n TIMES]

Needs an artifact that is built already (`make demo`, or one `smolbuild build -C DIRECTORY`); a run
that had to build something ends the benchmark. SMOLBUILD_HOME is used as it is set.
"""

import argparse

from measure import summary, timed


def main() -> None:
    parser = argparse.ArgumentParser(description="Wall time of a build that has nothing to do.")
    parser.add_argument("directory", nargs="?", default="examples/notes-service")
    parser.add_argument("-n", "--times", type=int, default=20)
    options = parser.parse_args()
    build = ("build", "-C", options.directory, "--json")
    timed(*build)  # fills the page cache, and builds when there was nothing yet
    rounds = [timed(*build) for _ in range(options.times)]
    if not all(answer["reused"] for _, answer in rounds):
        raise SystemExit("a round built something: this measured a build, not a reuse")
    print(summary("build, nothing changed", [elapsed for elapsed, _ in rounds]))
    versions = [timed("--version")[0] for _ in range(options.times)]
    print(summary("--version", versions))


if __name__ == "__main__":
    main()
