"""Measure what it takes to start four ranks from a notebook, beside other ways to do it: ``make bench``.

Each way runs in an interpreter of its own, once a round, so that a slow minute of the machine slows all of them. The
table shows medians and spreads. ``--record`` writes the tables of book/bench.md.
"""

import argparse
import contextlib
import csv
import datetime
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from helpers.command_line import aligned
from helpers.ranks.ports import hold_port

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "book" / "recorded"
NPROC = 4
TOTAL = 10.0  # 1 + 2 + 3 + 4, what the all-reduce gives
ROUNDS = 3  # how often each way is measured
BASE = "launch"  # The ratios of the table compare the other ways with it.
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
Seconds = dict[str, list[float]]  # {row of the table: its measurements}


# --- the same work for all: an all-reduce of a small tensor, its result brought back ----------------------------------


def all_reduce() -> float:
    """All-reduce [rank + 1] on a rank whose process group runs: returns 1 + 2 + … + N."""
    import torch
    import torch.distributed as dist

    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def start_group(rank: int, store: str) -> None:
    """Start a process group of NPROC ranks. ``store`` is the file by which the processes meet."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NPROC)


def with_group(rank: int, store: str) -> float:
    """``all_reduce`` in a process without a group: start one, by the file ``store``, and end it afterwards."""
    import torch.distributed as dist

    start_group(rank, store)
    total = all_reduce()
    dist.barrier()
    dist.destroy_process_group()
    return total


def use_one_thread() -> None:
    """Compute on one thread, as ranks do that torchrun starts."""
    import torch

    torch.set_num_threads(1)


def use_openmp() -> None:
    """Multiply matrices on two threads, as a notebook's kernel has done by the time it starts ranks.

    A process that was forked after that would hang, so a way to start ranks has to cope with it.
    """
    import torch

    torch.set_num_threads(2)
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)


# --- ways to start ranks: each measures itself, in this interpreter ---------------------------------------------------


def seconds_of(call: Callable[[], list[float]], calls: int) -> list[float]:
    """How long each of so many calls takes. A call returns what ``all_reduce`` gave on each rank, which is checked."""
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        totals = call()
        seconds.append(time.perf_counter() - start)
        assert totals == [TOTAL] * NPROC, totals
    return seconds


def first_and_later(way: str, seconds: list[float]) -> Seconds:
    """Two rows of the table: the first call, in which a way may start processes that it keeps, and the later ones."""
    return {f"first call: {way}": seconds[:1], f"later call: {way}": seconds[1:]}


def time_launch() -> Seconds:
    """This project's ``launch``, whose forkserver is started before, as in a chapter."""
    from helpers.ranks.launch import launch, warm

    warm()  # as `%load_ext helpers` does in a chapter's first cell
    use_openmp()
    seconds = seconds_of(lambda: launch(all_reduce, nproc=NPROC), calls=8)
    return first_and_later("launch", seconds)


def put_total(rank: int, store: str, queue: SimpleQueue) -> None:
    """``with_group`` for ways that do not return what a rank returns: its total goes into a queue."""
    queue.put((rank, with_group(rank, store)))


def totals_in(queue: SimpleQueue) -> list[float]:
    """The totals that all ranks have put into a queue, by rank."""
    totals = dict(queue.get() for _ in range(NPROC))
    return [totals[rank] for rank in range(NPROC)]


def time_spawn() -> Seconds:
    """PyTorch's own mp.spawn. Each rank is a new interpreter, and imports torch."""
    import torch.multiprocessing as mp

    def call() -> list[float]:
        queue = mp.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(put_total, (f"{folder}/store", queue), nprocs=NPROC)
        return totals_in(queue)

    use_openmp()
    return first_and_later("mp.spawn", seconds_of(call, calls=2))


def time_accelerate() -> Seconds:
    """accelerate's notebook_launcher. It forks, and the ranks hang if the caller has used OpenMP: here it has not."""
    import torch.multiprocessing as mp
    from accelerate import notebook_launcher

    def rank_main(store: str, queue: SimpleQueue) -> None:
        put_total(int(os.environ["RANK"]), store, queue)

    def call() -> list[float]:
        queue = mp.get_context("fork").SimpleQueue()
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(None),  # It prints how many processes it starts.
            hold_port() as port,  # Other programs on this machine may look for a free port, too.
        ):
            notebook_launcher(rank_main, (f"{folder}/store", queue), num_processes=NPROC, use_port=str(port))
        return totals_in(queue)

    return first_and_later("accelerate", seconds_of(call, calls=4))


RANK_SCRIPT = f"""\
import os, pathlib, sys
sys.path.insert(0, {str(ROOT / "tools")!r})
import bench
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
(folder / str(rank)).write_text(str(bench.with_group(rank, folder / "store")))
"""


def time_torchrun() -> Seconds:
    """torchrun, on a script whose ranks write their totals to files, from which they are read."""

    def call() -> list[float]:
        with tempfile.TemporaryDirectory() as folder, hold_port() as port:
            script = Path(folder, "script.py")
            script.write_text(RANK_SCRIPT)
            command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={NPROC}"]
            command += ["--master-addr=127.0.0.1", f"--master-port={port}", str(script), folder]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300)
            return [float(Path(folder, str(rank)).read_text()) for rank in range(NPROC)]

    return first_and_later("torchrun", seconds_of(call, calls=2))


def call_on_engine(tools: str, function: str, arguments: list) -> Any:
    """Call a function of this file on an engine of ipyparallel, by its name.

    ipyparallel sends this function's code to the engine, where this file has not been imported, because the bench runs
    it as its main program. So the function imports all that it uses, and this file, from the folder ``tools``.
    """
    import importlib
    import sys

    if tools not in sys.path:
        sys.path.insert(0, tools)
    bench = importlib.import_module("bench")
    return getattr(bench, function)(*arguments)


def time_ipyparallel() -> Seconds:
    """ipyparallel, whose engines keep running, so that also a process group can be kept between two calls.

    The first call contains the engines' start. With a group that is kept, a call is the all-reduce alone.
    """
    import logging

    import ipyparallel

    start = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        ipyparallel.Cluster(n=NPROC, log_level=logging.ERROR, profile_dir=folder) as client,
    ):

        def on_engines(function: str, arguments: Callable[[int], list]) -> list:
            """What a function of this file returns on each engine. ``arguments(rank)`` are its arguments there."""
            replies = []
            for rank in range(NPROC):
                engine = client[rank]
                replies.append(engine.apply_async(call_on_engine, str(ROOT / "tools"), function, arguments(rank)))
            return [reply.get(timeout=60) for reply in replies]

        store_numbers = itertools.count()  # A file by which processes met cannot be used again.

        def call() -> list[float]:
            store = f"{folder}/store{next(store_numbers)}"
            return on_engines("with_group", lambda rank: [rank, store])

        on_engines("use_one_thread", lambda rank: [])
        seconds_of(call, calls=1)
        first = time.perf_counter() - start
        later = seconds_of(call, calls=8)
        on_engines("start_group", lambda rank: [rank, f"{folder}/kept"])
        with_kept_group = seconds_of(lambda: on_engines("all_reduce", lambda rank: []), calls=8)
    return {**first_and_later("ipyparallel", [first, *later]), "later call: ipyparallel, group kept": with_kept_group}


WAYS = {
    "launch": time_launch,
    "mp.spawn": time_spawn,
    "accelerate": time_accelerate,
    "torchrun": time_torchrun,
    "ipyparallel": time_ipyparallel,
}


# --- rounds and the tables --------------------------------------------------------------------------------------------


def in_new_interpreter(way: str) -> Seconds:
    """Start this file again, in an interpreter that measures one way and prints what it measured as JSON.

    No way then profits from what another one has imported or started.
    """
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": LOOPBACK}
    command = [sys.executable, __file__, "--way", way]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment)
    if process.returncode != 0:
        raise RuntimeError(f"{way} failed:\n{process.stderr[-2000:]}")
    last_line = process.stdout.splitlines()[-1]
    return json.loads(last_line)


def measure() -> Seconds:
    """Measure all ways, one after another, in each of the rounds; return the seconds of all rounds by row."""
    seconds: Seconds = {}
    for number in range(ROUNDS):
        for way in WAYS:
            print(f"round {number + 1} of {ROUNDS}: {way}", file=sys.stderr, flush=True)
            for row, measured in in_new_interpreter(way).items():
                seconds.setdefault(row, []).extend(measured)
    return seconds


def table(seconds: Seconds) -> list[dict[str, str]]:
    """The table as rows, {column: text}, those of first calls before those of later calls.

    A row has the median, the spread, and how many times the median of ``launch`` in the same kind of call it is.
    """

    def call_of(row: str) -> str:
        """``first call`` or ``later call``, with which the name of a row begins."""
        return row.partition(": ")[0]

    rows = []
    for name in sorted(seconds, key=call_of):
        measured = seconds[name]
        median = statistics.median(measured)
        median_of_launch = statistics.median(seconds[f"{call_of(name)}: {BASE}"])
        rows.append(
            {
                "What": name,
                "Seconds": f"{median:.3g}",
                "Lowest to highest": f"{min(measured):.3g} to {max(measured):.3g}",
                "Ratio": f"{median / median_of_launch:.3g}",
                "Calls": str(len(measured)),
            }
        )
    return rows


def machine() -> list[dict[str, str]]:
    """The rows of the machine and the software. Call it before the measurements, which add to the load."""
    cpu = platform.machine()
    if sys.platform == "linux":
        model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if model:
            cpu = model[1]
    last_minute, *_ = os.getloadavg()
    values = {
        "CPU": cpu,
        "cores": str(os.cpu_count()),
        "load before the run": f"{last_minute:.1f}",
        "Python": platform.python_version(),
        **{name: version(name) for name in ("torch", "accelerate", "ipyparallel")},
        "date": datetime.date.today().isoformat(),
    }
    return [{"What": name, "Here": value} for name, value in values.items()]


def show(rows: list[dict[str, str]]) -> None:
    """Print rows as a table."""
    columns = list(rows[0])
    cells = [list(row.values()) for row in rows]
    for line in aligned([columns, *cells], left=range(len(columns))):
        print(line)


def write(rows: list[dict[str, str]], name: str) -> None:
    """Write rows to a file that book/bench.md shows."""
    with (RECORDED / f"bench_{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Measure all ways and print the tables; or, with --way, measure one in this interpreter and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write the tables of book/bench.md")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # for in_new_interpreter
    args = parser.parse_args()
    if args.way:
        # What a library printed may not end with a line break, and the JSON has to be the last line.
        print("\n" + json.dumps(WAYS[args.way]()))
        return
    tables = {"machine": machine(), "calls": table(measure())}
    for name, rows in tables.items():
        show(rows)
        if args.record:
            write(rows, name)


if __name__ == "__main__":
    main()
