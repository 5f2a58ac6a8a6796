"""How long from asking for a fork to its agent's first answer, and to its passed health check?

    .venv/bin/python bench/fork.py ARTIFACT [-n TIMES]

One fork at a time, as smolbuild itself reports it: milliseconds from the request inside the
command. The whole command, with the start of the Python interpreter, is on a line of its own.
"""

import argparse

from measure import summary, timed


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to ready of forks of one artifact.")
    parser.add_argument("artifact", help="name, reference or digest in the local store")
    parser.add_argument("-n", "--times", type=int, default=20)
    options = parser.parse_args()
    command = ("run", options.artifact, "-n", "1", "--json", "--", "true")
    timed(*command)  # materialises the artifact
    rounds = [timed(*command) for _ in range(options.times)]
    forks = [answer["forks"][0] for _, answer in rounds]
    cold = [fork["id"] for fork in forks if fork["how"] != forks[0]["how"]]
    if cold:
        raise SystemExit(f"forks were not all started the same way: {', '.join(cold)}")
    print(f"started by: {forks[0]['how']}")
    print(summary("first answer of the agent", [fork["agent_ms"] for fork in forks]))
    print(summary("health check passed", [fork["ready_ms"] for fork in forks]))
    print(summary("whole command, wall", [elapsed for elapsed, _ in rounds]))


if __name__ == "__main__":
    main()
