"""Measure what it takes to start ranks from a notebook, beside other ways to do it: ``make bench``.

Every round runs every contender once, each in an interpreter of its own, so that a slow minute of the machine slows all
of them. The table shows medians and spreads. ``--record`` writes the tables of book/bench.md.
"""

import argparse
import contextlib
import csv
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import psutil

from helpers.command_line import aligned
from helpers.ranks.ports import hold_port

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "book" / "recorded"
SIZES = (2, 4, 8)
CALLS = {"launch": 8, "mp.spawn": 2, "accelerate": 4, "torchrun": 2}  # calls in one interpreter, the first one apart
ENGINES = 4  # of ipyparallel: each takes as long to start as a rank of mp.spawn
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
Seconds = dict[str, list[float]]  # {kind of call: its measurements}
Call = Callable[[], list[float]]


# --- the same work for all: an all-reduce of a small tensor, its result brought back ----------------------------------


def all_reduce() -> float:
    """All-reduce [1] of rank + 1 on a rank whose process group runs: returns 1 + 2 + … + N."""
    import torch
    import torch.distributed as dist

    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def with_group(rank: int, world_size: int, store: str) -> float:
    """``all_reduce`` in a process without a group. ``store`` is the file by which the N processes meet."""
    import torch.distributed as dist

    start_group(rank, world_size, store)
    total = all_reduce()
    dist.barrier()
    dist.destroy_process_group()
    return total


def start_group(rank: int, world_size: int, store: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)


def use_openmp() -> None:
    """Multiply matrices on two threads, as a notebook's kernel has done by the time it starts ranks."""
    import torch

    torch.set_num_threads(2)
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)


# --- ways to start ranks: each returns a function that makes one call on nproc ranks ----------------------------------


def by_launch(nproc: int) -> Call:
    from helpers.ranks.launch import launch, warm

    warm()  # as `%load_ext helpers` does in a chapter's first cell
    use_openmp()
    return lambda: launch(all_reduce, nproc=nproc)


def on_rank(rank: int, nproc: int, store: str, queue: SimpleQueue) -> None:
    queue.put((rank, with_group(rank, nproc, store)))


def by_spawn(nproc: int) -> Call:
    import torch.multiprocessing as mp

    use_openmp()

    def call() -> list[float]:
        queue = mp.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(on_rank, (nproc, f"{folder}/store", queue), nprocs=nproc)
        return [total for _, total in sorted(queue.get() for _ in range(nproc))]

    return call


def by_accelerate(nproc: int) -> Call:
    """accelerate's notebook_launcher. It forks, and the ranks hang if the caller has used OpenMP: here it has not."""
    import torch.multiprocessing as mp
    from accelerate import notebook_launcher

    def call() -> list[float]:
        queue = mp.get_context("fork").SimpleQueue()

        def work(store: str) -> None:
            on_rank(int(os.environ["RANK"]), nproc, store, queue)

        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None), hold_port() as port:
            notebook_launcher(work, (f"{folder}/store",), num_processes=nproc, use_port=str(port))
        return [total for _, total in sorted(queue.get() for _ in range(nproc))]

    return call


SCRIPT = f"""\
import os, pathlib, sys
sys.path.insert(0, {str(ROOT / "tools")!r})
import bench
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
(folder / str(rank)).write_text(str(bench.with_group(rank, int(os.environ["WORLD_SIZE"]), folder / "store")))
"""


def by_torchrun(nproc: int) -> Call:
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}", "--master-addr=127.0.0.1"]

    def call() -> list[float]:
        with tempfile.TemporaryDirectory() as folder, hold_port() as port:
            script = Path(folder, "script.py")
            script.write_text(SCRIPT)
            line = [*start, f"--master-port={port}", str(script), folder]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(line, env=environment, check=True, capture_output=True, text=True, timeout=300)
            return [float(Path(folder, str(rank)).read_text()) for rank in range(nproc)]

    return call


WAYS = {"launch": by_launch, "mp.spawn": by_spawn, "accelerate": by_accelerate, "torchrun": by_torchrun}


def time_calls(way: str, nproc: int) -> Seconds:
    """Seconds of the first call in this interpreter, and of the later ones."""
    seconds, call = [], WAYS[way](nproc)
    for _ in range(CALLS[way]):
        start = time.perf_counter()
        totals = call()
        seconds.append(time.perf_counter() - start)
        assert totals == [nproc * (nproc + 1) / 2] * nproc, totals
    return {"first": seconds[:1], "later": seconds[1:]}


def time_ipyparallel(calls: int = 8) -> Seconds:
    """Seconds of the engines' start with a call, of calls that make a group, and of calls on a group that is kept."""
    import ipyparallel

    start = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        ipyparallel.Cluster(n=ENGINES, log_level=40, profile_dir=folder) as client,
    ):
        engines = [client[rank] for rank in range(ENGINES)]

        def on_engines(code: str) -> list:
            """What ``code`` evaluates to on each engine; RANK in it stands for the engine's number."""
            pending = [engine.apply_async(eval, code.replace("RANK", str(rank))) for rank, engine in enumerate(engines)]
            return [reply.get(timeout=60) for reply in pending]

        def timed(code: str, start: float | None = None) -> float:
            start = start or time.perf_counter()
            totals = on_engines(code)
            assert totals == [ENGINES * (ENGINES + 1) / 2] * ENGINES, totals
            return time.perf_counter() - start

        path, name = str(ROOT / "tools"), "__import__('bench')"
        on_engines(f"__import__('sys').path.insert(0, {path!r}) or __import__('torch').set_num_threads(1)")
        with_groups = [f"{name}.with_group(RANK, {ENGINES}, '{folder}/store-{number}')" for number in range(calls + 1)]
        first = timed(with_groups[0], start)
        later = [timed(code) for code in with_groups[1:]]
        on_engines(f"{name}.start_group(RANK, {ENGINES}, '{folder}/kept')")
        return {"first": [first], "later": later, "kept": [timed(f"{name}.all_reduce()") for _ in range(calls)]}


# --- rounds and the tables --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A function of this file with its arguments, and for each kind of its seconds the (measure, way) of the table."""

    function: str
    args: tuple
    places: dict[str, tuple[str, str]]
    once: bool = False  # in the first round only


def contenders() -> Iterator[Contender]:
    """In the order in which a round runs them. The first way of a measure is the one with the ratio 1."""
    for nproc in SIZES:
        measures = {kind: f"{kind} call, {nproc} ranks" for kind in ("first", "later")}
        for way in WAYS:
            slow = nproc == max(SIZES) and way in ("mp.spawn", "torchrun")
            places = {kind: (measure, way) for kind, measure in measures.items()}
            yield Contender("time_calls", (way, nproc), places, once=slow)
        if nproc == ENGINES:
            places = {kind: (measure, "ipyparallel") for kind, measure in measures.items()}
            places["kept"] = measures["later"], "ipyparallel, group kept"
            yield Contender("time_ipyparallel", (), places)


def child(contender: Contender) -> Seconds:
    """What the contender's function returns in a new interpreter."""
    command = [sys.executable, __file__, "--child", json.dumps([contender.function, *contender.args])]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": LOOPBACK}
    process = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment)
    if process.returncode:
        raise RuntimeError(process.stderr[-2000:])
    return json.loads(process.stdout.splitlines()[-1])


def measure(
    rounds: int, entrants: list[Contender], run: Callable[[Contender], Seconds] = child
) -> dict[tuple[str, str], list[float]]:
    """{(measure, way): [seconds]} of all rounds. Who fails gets no seconds in that round, and a line on stderr."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        for contender in [contender for contender in entrants if number == 0 or not contender.once]:
            note, by_kind = "done", Seconds()
            try:
                by_kind = run(contender)
            except Exception as error:
                note = f"failed: {(str(error).strip().splitlines() or [type(error).__name__])[-1]}"
            print(f"round {number + 1}: {contender.function}{contender.args}: {note}", file=sys.stderr, flush=True)
            for kind, place in contender.places.items():
                seconds.setdefault(place, []).extend(by_kind.get(kind, []))
    return seconds


def table(seconds: dict[tuple[str, str], list[float]]) -> list[dict[str, str]]:
    """The rows, by measure: the median, its spread, and its ratio to the first way of the measure."""
    bases: dict[str, list[float]] = {}
    for (name, _), numbers in seconds.items():
        bases.setdefault(name, numbers)
    rows = []
    for (name, way), numbers in sorted(seconds.items(), key=lambda item: list(bases).index(item[0][0])):
        row = {"What": f"{name}: {way}", "Seconds": "failed", "Lowest to highest": "–", "Ratio": "–"}
        if numbers:
            middle, spread = statistics.median(numbers), f"{short(min(numbers))} to {short(max(numbers))}"
            row |= {"Seconds": short(middle), "Lowest to highest": spread}
            row["Ratio"] = short(middle / statistics.median(bases[name])) if bases[name] else "–"
        rows.append(row | {"Calls": str(len(numbers))})
    return rows


def short(number: float) -> str:
    """Three digits, and no exponent."""
    return f"{number:.0f}" if number >= 100 else f"{float(f'{number:.3g}'):f}".rstrip("0").rstrip(".")


def machine(rounds: int) -> list[dict[str, str]]:
    """The rows of the machine, the software and this run. Call it before the run, because of the load."""
    info = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    cpu = re.search(r"^model name\s*: (.*)", info, re.MULTILINE)
    system = "macOS" if sys.platform == "darwin" else platform.freedesktop_os_release()["PRETTY_NAME"]
    versions = {package.metadata["Name"]: package.version for package in distributions()}
    values = {
        "CPU": cpu[1] if cpu else platform.machine(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "load before the run": f"{os.getloadavg()[0]:.1f}",
        "system": system,
        "Python": platform.python_version(),
        **{name: versions.get(name, "not installed") for name in ("torch", "accelerate", "ipyparallel")},
        "date": datetime.date.today().isoformat(),
        "rounds": str(rounds),
    }
    return [{"What": name, "Here": value} for name, value in values.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="repetitions, interleaved (default: 3)")
    parser.add_argument("--only", default="", metavar="TEXT", help="measures with this in their name")
    parser.add_argument("--record", action="store_true", help="write the tables of book/bench.md; takes all measures")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, *rest = json.loads(args.child)
        print("\n" + json.dumps(globals()[name](*rest)))
        return
    if args.record and args.only:
        parser.error("--record takes all measures: leave out --only")
    entrants = [entry for entry in contenders() if any(args.only in name for name, _ in entry.places.values())]
    tables = {"machine": machine(args.rounds), "calls": table(measure(args.rounds, entrants))}
    for name, rows in tables.items():
        print(*aligned([list(rows[0]), *(list(row.values()) for row in rows)], left=range(len(rows[0]))), sep="\n")
        if args.record:
            with (RECORDED / f"bench_{name}.csv").open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
