"""The benchmark: its record has what tools/bench.py measures now, and a contender that fails is named."""

import csv
import re
import socket

import bench
from hygiene import MACHINE


def test_the_record_has_every_measure_and_no_other():
    calls, machine = (
        [row["What"] for row in csv.DictReader((bench.RECORDED / f"bench_{name}.csv").read_text().splitlines())]
        for name in ("calls", "machine")
    )
    places = [place for contender in bench.contenders() for place in contender.places.values()]
    assert sorted(calls) == sorted(f"{measure}: {way}" for measure, way in places)
    assert machine == [row["What"] for row in bench.machine(rounds=1)]


def test_the_page_shows_every_table_and_no_table_names_the_machine():
    names = re.findall(r":file: recorded/(\S+)", (bench.ROOT / "book" / "bench.md").read_text())
    assert sorted(names) == sorted(path.name for path in bench.RECORDED.glob("bench_*.csv"))
    for name in names:
        text = (bench.RECORDED / name).read_text()
        assert not MACHINE.search(text) and socket.gethostname() not in text.split()


def test_rows_have_medians_and_ratios_and_a_way_that_fails_is_named(capsys):
    seconds = {"base": [1.0, 3.0, 2.0], "twice": [4.0, None, 4.5], "never": [None] * 3, "once": [1234.5]}

    def run(contender):
        if (value := seconds[contender.function].pop(0)) is None:
            raise OSError("no such engine")
        return {"later": [value]}

    entrants = [bench.Contender(way, (), {"later": ("later call", way)}, once=way == "once") for way in seconds]
    rows = [list(row.values()) for row in bench.table(bench.measure(3, entrants, run))]
    assert rows == [
        ["later call: base", "2", "1 to 3", "1", "3"],
        ["later call: twice", "4.25", "4 to 4.5", "2.12", "2"],
        ["later call: never", "failed", "–", "–", "0"],
        ["later call: once", "1234", "1234 to 1234", "617", "1"],
    ]
    assert capsys.readouterr().err.count("no such engine") == 4
