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

from helpers.command_line import aligned
from helpers.ranks.ports import hold_port

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "book" / "recorded"
NPROC = 4
TOTAL = 10.0  # 1 + 2 + 3 + 4
ROUNDS = 3
BASE = "launch"  # the other ways are compared with it
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
Seconds = dict[str, list[float]]  # {row of the table: its measurements}


# --- the same work for all: an all-reduce of a small tensor, its result brought back ----------------------------------


def all_reduce() -> float:
    """All-reduce [1] of rank + 1 on a rank whose process group runs: returns 1 + 2 + … + N."""
    import torch
    import torch.distributed as dist

    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def start_group(rank: int, store: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NPROC)


def with_group(rank: int, store: str) -> float:
    """``all_reduce`` in a process without a group. ``store`` is the file by which the processes meet."""
    import torch.distributed as dist

    start_group(rank, store)
    total = all_reduce()
    dist.barrier()
    dist.destroy_process_group()
    return total


def use_openmp() -> None:
    """Multiply matrices on two threads, as a notebook's kernel has done by the time it starts ranks."""
    import torch

    torch.set_num_threads(2)
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)


# --- ways to start ranks: each measures itself, in this interpreter ---------------------------------------------------


def seconds_of(call: Callable[[], list[float]], calls: int) -> list[float]:
    """How long each of so many calls takes. A call returns what ``all_reduce`` gave on each rank."""
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        totals = call()
        seconds.append(time.perf_counter() - start)
        assert totals == [TOTAL] * NPROC, totals
    return seconds


def first_and_later(way: str, seconds: list[float]) -> Seconds:
    return {f"first call: {way}": seconds[:1], f"later call: {way}": seconds[1:]}


def time_launch() -> Seconds:
    from helpers.ranks.launch import launch, warm

    warm()  # as `%load_ext helpers` does in a chapter's first cell
    use_openmp()
    return first_and_later("launch", seconds_of(lambda: launch(all_reduce, nproc=NPROC), 8))


def put_total(rank: int, store: str, queue: SimpleQueue) -> None:
    queue.put((rank, with_group(rank, store)))


def totals_in(queue: SimpleQueue) -> list[float]:
    """The ranks' totals, in their order."""
    return [total for _, total in sorted(queue.get() for _ in range(NPROC))]


def time_spawn() -> Seconds:
    import torch.multiprocessing as mp

    def call() -> list[float]:
        queue = mp.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(put_total, (f"{folder}/store", queue), nprocs=NPROC)
        return totals_in(queue)

    use_openmp()
    return first_and_later("mp.spawn", seconds_of(call, 2))


def time_accelerate() -> Seconds:
    """accelerate's notebook_launcher. It forks, and the ranks hang if the caller has used OpenMP: here it has not."""
    import torch.multiprocessing as mp
    from accelerate import notebook_launcher

    def call() -> list[float]:
        queue = mp.get_context("fork").SimpleQueue()

        def work(store: str) -> None:
            put_total(int(os.environ["RANK"]), store, queue)

        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None), hold_port() as port:
            notebook_launcher(work, (f"{folder}/store",), num_processes=NPROC, use_port=str(port))
        return totals_in(queue)

    return first_and_later("accelerate", seconds_of(call, 4))


SCRIPT = f"""\
import os, pathlib, sys
sys.path.insert(0, {str(ROOT / "tools")!r})
import bench
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
(folder / str(rank)).write_text(str(bench.with_group(rank, folder / "store")))
"""


def time_torchrun() -> Seconds:
    def call() -> list[float]:
        with tempfile.TemporaryDirectory() as folder, hold_port() as port:
            script = Path(folder, "script.py")
            script.write_text(SCRIPT)
            command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={NPROC}"]
            command += ["--master-addr=127.0.0.1", f"--master-port={port}", str(script), folder]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300)
            return [float(Path(folder, str(rank)).read_text()) for rank in range(NPROC)]

    return first_and_later("torchrun", seconds_of(call, 2))


def time_ipyparallel() -> Seconds:
    """The first call contains the engines' start. With a group that is kept, a call is the all-reduce alone."""
    import ipyparallel

    start = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        ipyparallel.Cluster(n=NPROC, log_level=40, profile_dir=folder) as client,
    ):

        def on_engines(code: str) -> list:
            """What ``code`` evaluates to on each engine; RANK in it stands for the engine's number."""
            pending = [client[rank].apply_async(eval, code.replace("RANK", str(rank))) for rank in range(NPROC)]
            return [reply.get(timeout=60) for reply in pending]

        stores = itertools.count()

        def call() -> list[float]:
            return on_engines(f"__import__('bench').with_group(RANK, '{folder}/store{next(stores)}')")

        on_engines(f"__import__('sys').path.insert(0, {str(ROOT / 'tools')!r})")
        on_engines("__import__('torch').set_num_threads(1)")
        seconds_of(call, 1)
        first = time.perf_counter() - start
        later = seconds_of(call, 8)
        on_engines(f"__import__('bench').start_group(RANK, '{folder}/kept')")
        kept = seconds_of(lambda: on_engines("__import__('bench').all_reduce()"), 8)
        return {**first_and_later("ipyparallel", [first, *later]), "later call: ipyparallel, group kept": kept}


WAYS = {
    "launch": time_launch,
    "mp.spawn": time_spawn,
    "accelerate": time_accelerate,
    "torchrun": time_torchrun,
    "ipyparallel": time_ipyparallel,
}


# --- rounds and the tables --------------------------------------------------------------------------------------------


def in_new_interpreter(way: str) -> Seconds:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": LOOPBACK}
    command = [sys.executable, __file__, "--way", way]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment)
    if process.returncode != 0:
        raise RuntimeError(f"{way} failed:\n{process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def measure() -> Seconds:
    """All ways, one after another, in each of the rounds."""
    seconds: Seconds = {}
    for number in range(ROUNDS):
        for way in WAYS:
            print(f"round {number + 1} of {ROUNDS}: {way}", file=sys.stderr, flush=True)
            for row, measured in in_new_interpreter(way).items():
                seconds.setdefault(row, []).extend(measured)
    return seconds


def table(seconds: Seconds) -> list[dict[str, str]]:
    """The rows, first calls before later ones: the median, its spread, and its ratio to that of ``launch``."""
    rows = []
    for name in sorted(seconds, key=lambda name: name.partition(": ")[0]):
        measured = seconds[name]
        base = seconds[f"{name.partition(': ')[0]}: {BASE}"]
        rows.append(
            {
                "What": name,
                "Seconds": f"{statistics.median(measured):.3g}",
                "Lowest to highest": f"{min(measured):.3g} to {max(measured):.3g}",
                "Ratio": f"{statistics.median(measured) / statistics.median(base):.3g}",
                "Calls": str(len(measured)),
            }
        )
    return rows


def machine() -> list[dict[str, str]]:
    """The rows of the machine and the software. Call it before the run, because of the load."""
    cpu = platform.machine()
    if sys.platform == "linux":
        model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = model[1] if model else cpu
    values = {
        "CPU": cpu,
        "cores": str(os.cpu_count()),
        "load before the run": f"{os.getloadavg()[0]:.1f}",
        "Python": platform.python_version(),
        **{name: version(name) for name in ("torch", "accelerate", "ipyparallel")},
        "date": datetime.date.today().isoformat(),
    }
    return [{"What": name, "Here": value} for name, value in values.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write the tables of book/bench.md")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print("\n" + json.dumps(WAYS[args.way]()))
        return
    tables = {"machine": machine(), "calls": table(measure())}
    for name, rows in tables.items():
        columns = list(rows[0])
        print(*aligned([columns, *(list(row.values()) for row in rows)], left=range(len(columns))), sep="\n")
        if args.record:
            with (RECORDED / f"bench_{name}.csv").open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, columns, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
