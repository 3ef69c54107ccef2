"""The benchmark: its record has what tools/bench.py measures now, and a contender that fails is named."""

import re
import socket

import bench
import bench_record
import nbformat
import pytest
from bench_jobs import accuracy
from bench_record import recorded
from hygiene import MACHINE

RECORD_ANEW = "run `make bench ARGS=--record` on an idle machine"
PLACES = {}  # {table: ["measure: row"]}, in the order of the table
for one in bench.contenders(bench.NOTEBOOK):
    PLACES.setdefault(one.table, {}).update(dict.fromkeys(one.places.values()))


@pytest.mark.parametrize("table", PLACES)
def test_the_record_has_every_measure_and_no_other(table):
    rows = [row["What"] for row in recorded(table)]
    assert sorted(rows) == sorted(f"{measure}: {row}" for measure, row in PLACES[table]), RECORD_ANEW


def test_the_record_has_the_targets_of_the_code():
    rows = recorded("targets")
    limits = [(text, f"{limit:.3f}") for text, _, limit, _ in bench.targets({})]
    assert [(row["Target"], row["At most"]) for row in rows] == limits, RECORD_ANEW
    for row in rows:
        told = row["Verdict"]
        if row["Measured"] == "–":
            assert told == "not measured", row
        elif row["Measured"] != row["At most"]:  # if they are equal, only the digits that are not shown decide
            assert told == ("met" if float(row["Measured"]) < float(row["At most"]) else "MISSED"), row


def test_the_recorded_errors_are_those_of_the_planner_and_of_chapter_15():
    assert recorded("accuracy") == accuracy(), RECORD_ANEW
    chapter = "".join(cell.source for cell in nbformat.read(bench.ROOT / "notebooks/15_planning.ipynb", 4).cells)
    for row in [row for row in accuracy() if "{cite}" in row["Tool"]]:
        assert f"| {row['Tool']} | {row['Mean error']} |" in chapter


def test_the_page_shows_every_table_and_no_table_names_the_machine():
    page = (bench.ROOT / "book" / "bench.md").read_text()
    shown = re.findall(r":file: recorded/(\S+)", page)
    assert sorted(shown) == sorted(path.name for path in bench_record.FOLDER.glob("bench_*.csv"))
    for name in shown:
        text = (bench_record.FOLDER / name).read_text()
        assert not MACHINE.search(text) and socket.gethostname() not in text.split()
        assert all(text.splitlines()[0].split(",")), f"{name} has a column without a head"
    names = [row["What"] for row in recorded("machine")]
    assert names == [*bench_record.machine(rounds=1), "it took"], RECORD_ANEW


def contender(row, *rounds):
    """A contender that takes these seconds in its rounds; None fails."""
    left = list(rounds)

    def call():
        seconds = left.pop(0)
        if seconds is None:
            raise OSError("no such engine")
        return {"later": [seconds]}

    return bench.Contender("calls", {"later": ("later call", row)}, call, ())


def test_rows_have_medians_and_ratios_and_a_contender_that_fails_is_named(capsys):
    chosen = [
        contender("base", 1.0, 3.0, 2.0),
        contender("twice", 4.0, None, 4.5),
        contender("never", None, None, None),
    ]
    found, failed = bench.measure(3, chosen)
    base, twice, never = bench_record.tables(chosen, found, failed)["calls"]
    assert list(base.values()) == ["later call: base", "2", "1 to 3", "1", "3"]
    assert list(twice.values()) == ["later call: twice", "4.25", "4 to 4.5", "2.12", "2, and 1 failed"]
    assert list(never.values()) == ["later call: never", "failed", "–", "–", "0"]
    assert capsys.readouterr().err.count("no such engine") == 4


def test_a_slow_contender_runs_in_the_first_round_only():
    one = contender("slow", 1.0)
    once = bench.Contender(one.table, one.places, one.function, one.args, once=True)
    assert bench.measure(3, [once]) == ({"later call": {"slow": [1.0]}}, {})


def test_a_contender_that_returns_other_kinds_has_failed():
    one = bench.Contender("calls", {"later": ("later call", "a"), "kept": ("kept", "a")}, lambda: {"later": [1]}, ())
    found, failed = bench.measure(1, [one])
    assert found == {"later call": {"a": []}, "kept": {"a": []}} and list(failed.values()) == [1, 1]


def test_targets_are_met_missed_or_not_measured():
    found = {"a rank fails: raise": {"launch": [0.1, 0.6, 0.7]}, bench.bench_jobs.TRACE: {"first call": [9.0]}}
    rows = bench_record.verdicts(bench.targets(found))
    told = {row["Target"]: row["Verdict"] for row in rows if row["Verdict"] != "not measured"}
    assert list(told.values()) == ["MISSED", "met"] and len(rows) > 2


@pytest.mark.parametrize("number, text", [(0.0123456, "0.0123"), (1.0, "1"), (83.44, "83.4"), (1234.5, "1234")])
def test_three_digits(number, text):
    assert bench_record.short(number) == text
