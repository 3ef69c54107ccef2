"""What tools/bench.py shows and records: its tables, the verdicts on its targets, and the machine."""

import csv
import datetime
import os
import platform
import statistics
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from helpers.command_line import aligned

FOLDER = Path(__file__).parents[1] / "book" / "recorded"
PEERS = ("torch", "accelerate", "ipyparallel", "nbval", "nbclient")


def path_of(table):
    return FOLDER / f"bench_{table}.csv"


def tables(contenders, found, failed):
    """{table: [row]}: each row's median, its spread, and its ratio to the first row of its measure.

    ``found`` is {measure: {row: [seconds]}}, ``failed`` is {(measure, row): rounds}. A row that always failed says so.
    """
    places = {}
    for one in contenders:
        for measure, _ in one.places.values():
            places.setdefault(one.table, {})[measure] = found[measure]
    return {
        table: [row_of(measure, name, rows, failed) for measure, rows in measures.items() for name in rows]
        for table, measures in places.items()
    }


def row_of(measure, name, rows, failed):
    numbers, base = rows[name], next(iter(rows.values()))
    lost = failed.get((measure, name), 0)
    row = {"What": f"{measure}: {name}", "Seconds": "failed", "Lowest to highest": "–", "Ratio": "–", "Calls": "0"}
    if numbers:
        middle = statistics.median(numbers)
        row |= {"Seconds": short(middle), "Lowest to highest": f"{short(min(numbers))} to {short(max(numbers))}"}
        row |= {"Ratio": short(middle / statistics.median(base)) if base else "–"}
        row |= {"Calls": str(len(numbers)) + (f", and {lost} failed" if lost else "")}
    return row


def short(number):
    """Three digits, and no exponent."""
    return f"{number:.0f}" if number >= 100 else f"{float(f'{number:.3g}'):f}".rstrip("0").rstrip(".")


def verdicts(targets):
    """[row] of the targets, from tools/bench.py's (text, value, limit, met)."""
    return [
        {
            "Target": text,
            "Measured": "–" if value is None else f"{value:.3f}",
            "At most": f"{limit:.3f}",
            "Verdict": {True: "met", False: "MISSED", None: "not measured"}[met],
        }
        for text, value, limit, met in targets
    ]


def machine(rounds):
    """{what: value} of the machine, the software and this run. Call it before the run, because of the load."""
    return {
        "CPU": cpu(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "load before the run": f"{os.getloadavg()[0]:.1f}",
        "system": system(),
        "Python": platform.python_version(),
        **{name: version_of(name) for name in PEERS},
        "date": datetime.date.today().isoformat(),
        "rounds": str(rounds),
    }


def cpu():
    """The CPU's model, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def system():
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def version_of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def text(rows):
    """The rows in columns, with a line of heads."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(f"{line}\n" for line in aligned(lines, left=range(len(rows[0]))))


def write(tables):
    """Write each table to book/recorded, where book/bench.md reads them."""
    for table, rows in tables.items():
        with path_of(table).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def recorded(table):
    """The rows of a table that was written."""
    with path_of(table).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
