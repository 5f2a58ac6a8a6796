"""Write notes.csv: 1,000 notes, the same bytes on every machine and at any time."""

import csv
import datetime as dt
import sys
from pathlib import Path

ROWS = 1000
TOPICS = ["garden", "kitchen", "library", "harbour", "workshop", "orchard", "station", "market"]
ACTIONS = ["Measure", "Paint", "Repair", "Sketch", "Count", "Order", "Label", "Clean", "Move"]
THINGS = ["shelves", "lamps", "windows", "benches", "boxes", "signs", "ropes", "maps", "clocks"]
FIRST_DAY = dt.date(2024, 1, 1)


def note(number: int) -> tuple[int, str, str, str]:
    """Return row ``number``: id, title, body, day."""
    topic = TOPICS[number % len(TOPICS)]
    action = ACTIONS[number * 5 % len(ACTIONS)]
    thing = THINGS[number * 7 % len(THINGS)]
    day = FIRST_DAY + dt.timedelta(days=number * 3 % 700)
    body = f"{action} the {thing} of the {topic}, then write down what is left to do."
    return number, f"{action} the {thing} ({topic} {number})", body, day.isoformat()


def main() -> None:
    """Write the file beside this script, or to standard output with ``-``."""
    target = Path(__file__).with_name("notes.csv")
    stream = sys.stdout if sys.argv[1:] == ["-"] else target.open("w", encoding="ascii", newline="")
    with stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("id", "title", "body", "created"))
        writer.writerows(note(number) for number in range(1, ROWS + 1))


if __name__ == "__main__":
    main()
