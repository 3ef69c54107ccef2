"""Measure what it takes to start four ranks from a notebook, beside other ways to do it: ``make bench``.

With ``--trainer`` it measures chapter 11's script beside a loop that is written by hand: ``make bench ARGS=--trainer``.

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
    """Measure this project's ``launch``, whose forkserver is started before, as in a chapter."""
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
    """Measure PyTorch's ``mp.spawn``, with which each rank is a new interpreter that has to import torch."""
    import torch.multiprocessing as mp

    def spawn_and_all_reduce() -> list[float]:
        queue = mp.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(put_total, (f"{folder}/store", queue), nprocs=NPROC)
        return totals_in(queue)

    use_openmp()
    seconds = seconds_of(spawn_and_all_reduce, calls=2)
    return first_and_later("mp.spawn", seconds)


def time_accelerate() -> Seconds:
    """Measure how long accelerate's ``notebook_launcher`` takes to start the ranks, to all-reduce, and to end them.

    It forks the ranks from this process. Forked ranks would hang if this process had multiplied matrices on several
    threads before, so, unlike the other measurements, this one does not call ``use_openmp``.
    """
    import torch.multiprocessing as mp
    from accelerate import notebook_launcher

    def run_rank(store: str, queue: SimpleQueue) -> None:
        rank = int(os.environ["RANK"])  # accelerate sets this variable
        put_total(rank, store, queue)

    def launch_and_all_reduce() -> list[float]:
        queue = mp.get_context("fork").SimpleQueue()
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(None),  # accelerate prints how many processes it starts
            hold_port() as port,  # a free port, which no other program on this machine can take meanwhile
        ):
            arguments_of_run_rank = (f"{folder}/store", queue)
            notebook_launcher(run_rank, arguments_of_run_rank, num_processes=NPROC, use_port=str(port))
        return totals_in(queue)

    seconds = seconds_of(launch_and_all_reduce, calls=4)
    return first_and_later("accelerate", seconds)


RANK_SCRIPT = f"""\
import os, pathlib, sys
sys.path.insert(0, {str(ROOT / "tools")!r})
import bench
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
(folder / str(rank)).write_text(str(bench.with_group(rank, folder / "store")))
"""


def time_torchrun() -> Seconds:
    """Measure torchrun, on a script whose ranks write the totals of their all-reduce to files."""

    def torchrun_and_all_reduce() -> list[float]:
        with tempfile.TemporaryDirectory() as folder, hold_port() as port:
            script = Path(folder, "script.py")
            script.write_text(RANK_SCRIPT)
            command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={NPROC}"]
            command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
            command += [str(script), folder]  # rank 2 writes its total to the file "2" in this folder
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300)
            return [float(Path(folder, str(rank)).read_text()) for rank in range(NPROC)]

    seconds = seconds_of(torchrun_and_all_reduce, calls=2)
    return first_and_later("torchrun", seconds)


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
    """Measure ipyparallel, whose processes, the engines, keep running between two calls.

    The first call contains the start of the engines. Because they keep running, a process group can be kept too: a
    third row has the seconds of calls that do nothing but all-reduce in such a group.
    """
    import logging

    import ipyparallel

    before_first_call = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        ipyparallel.Cluster(n=NPROC, log_level=logging.ERROR, profile_dir=folder) as client,
    ):

        def on_engines(function: str, arguments: Callable[[int], list]) -> list:
            """Call a function of this file on each engine, as one rank; return what it returned there, by rank.

            ``arguments(rank)`` are the arguments with which rank ``rank`` calls it.
            """
            replies = []
            for rank in range(NPROC):
                engine = client[rank]
                replies.append(engine.apply_async(call_on_engine, str(ROOT / "tools"), function, arguments(rank)))
            return [reply.get(timeout=60) for reply in replies]

        store_numbers = itertools.count()

        def all_reduce_in_new_group() -> list[float]:
            # Each group needs a new file, by which its ranks find each other.
            store = f"{folder}/store{next(store_numbers)}"
            return on_engines("with_group", lambda rank: [rank, store])

        def all_reduce_in_kept_group() -> list[float]:
            return on_engines("all_reduce", lambda rank: [])

        on_engines("use_one_thread", lambda rank: [])
        seconds_of(all_reduce_in_new_group, calls=1)
        first_call = time.perf_counter() - before_first_call
        later_calls = seconds_of(all_reduce_in_new_group, calls=8)

        on_engines("start_group", lambda rank: [rank, f"{folder}/kept"])
        calls_in_kept_group = seconds_of(all_reduce_in_kept_group, calls=8)

    seconds = first_and_later("ipyparallel", [first_call, *later_calls])
    seconds["later call: ipyparallel, group kept"] = calls_in_kept_group
    return seconds


WAYS = {
    "launch": time_launch,
    "mp.spawn": time_spawn,
    "accelerate": time_accelerate,
    "torchrun": time_torchrun,
    "ipyparallel": time_ipyparallel,
}


# --- chapter 11's script beside a loop that is written by hand --------------------------------------------------------

PIECE = 10  # steps of one loop, after which the other one takes its turn
SIZES = {  # (width, more layers, pieces of each loop)
    "20 thousand weights, the script's own": (256, 0, 30),
    "4 million weights": (1024, 4, 20),
    "17 million weights": (2048, 4, 10),
}
Clocks = dict[str, Callable[[], float]]
CLOCKS: Clocks = {"processor": time.process_time, "wall": time.perf_counter}


def loop_by_hand(trainer: Any, args: Any) -> Callable[[], None]:
    """A function that trains for PIECE steps each time: DDP and nothing that a short experiment would leave out."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    train_set, _ = trainer.load_data(args)
    model = DistributedDataParallel(trainer.build_model(args))
    optimizer = trainer.build_optimizer(model.module, args)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.max_steps)
    own_batch_size = args.batch_size // dist.get_world_size()
    sampler: DistributedSampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, own_batch_size, sampler=sampler, drop_last=True)

    def endless() -> Any:
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            yield from loader

    batches = endless()

    def train() -> None:
        total = torch.zeros(())
        for images, labels in itertools.islice(batches, PIECE):
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            optimizer.step()
            schedule.step()
            total += loss.detach()
        dist.all_reduce(total)

    return train


def time_trainer(script: str, width: int, layers: int, num_pieces: int) -> dict[str, dict[str, list[float]]]:
    """{clock: {"script": seconds of each piece, "by hand": seconds of each piece}} of this rank.

    The script's ``train`` runs as it is. At every PIECE-th call of its ``take_step`` its clock stops, and the loop by
    hand has its turn. So both have the same process, the same ranks and the same minute.
    """
    import importlib.util
    from unittest import mock

    import torch
    import torch.distributed as dist
    from torch import nn

    spec = importlib.util.spec_from_file_location("trainer", script)
    assert spec is not None and spec.loader is not None
    trainer: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trainer)
    flags = ["--max-steps", str(PIECE * num_pieces + 1), "--log-every", str(PIECE), "--width", str(width)]
    flags += ["--val-every", "1000000"]
    with mock.patch("sys.argv", [script, *flags]):
        args = trainer.parse_args()

    def build_model(args: Any) -> nn.Module:
        hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, 10))

    if layers > 0:
        trainer.build_model = build_model
    by_hand = loop_by_hand(trainer, args)
    by_hand()
    own_step = trainer.take_step
    seconds: dict[str, dict[str, list[float]]] = {clock: {"script": [], "by hand": []} for clock in CLOCKS}
    begin: dict[str, float] = {}

    def take_step(training: Any, micro_batches: list, step: int, args: Any) -> Any:
        if step % PIECE == 1:
            if begin:
                for name, clock in CLOCKS.items():
                    seconds[name]["script"].append(clock() - begin[name])
            dist.barrier()
            starts = {name: clock() for name, clock in CLOCKS.items()}
            by_hand()
            for name, clock in CLOCKS.items():
                seconds[name]["by hand"].append(clock() - starts[name])
            dist.barrier()
            begin.update({name: clock() for name, clock in CLOCKS.items()})
        return own_step(training, micro_batches, step, args)

    trainer.take_step = take_step
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(None):
        trainer.train(args, torch.device("cpu"))
    return seconds


def trainer_table() -> list[dict[str, str]]:
    """The speed of chapter 11's script as a share of that of a loop by hand, on two ranks, for models of several sizes.

    The script does more in each step, such as seeding each sample and agreeing on a stop. This takes the same time for
    each size, so a larger model has a better ratio.

    The processor's time is that of both ranks together. It says what the loop costs, also on a machine that is shared.
    The wall's time contains waits for the other rank and for other programs.
    """
    from helpers.export import chapters
    from helpers.ranks.launch import launch

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        [script] = chapters.export("11", Path(folder))
        for name, (width, layers, num_pieces) in SIZES.items():
            of_ranks = launch(time_trainer, str(script), width, layers, num_pieces, nproc=2, timeout=3600)
            row = {"Model": name}
            for clock in CLOCKS:
                loops = {}
                for loop in ("script", "by hand"):
                    pieces = [seconds[clock][loop] for seconds in of_ranks]
                    loops[loop] = [sum(both) for both in zip(*pieces, strict=True)]
                pairs = zip(loops["by hand"], loops["script"], strict=False)  # the last piece by hand has no partner
                ratio = statistics.median(by_hand / own for by_hand, own in pairs)
                row[f"Speed, {clock} time"] = f"{ratio:.3f}"
                row[f"ms a step by hand, {clock}"] = f"{statistics.median(loops['by hand']) / PIECE / 2 * 1000:.1f}"
            rows.append({**row, "Pieces": f"{num_pieces} of {PIECE} steps"})
    return rows


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
    """The table of the measurements as rows, {column: text}: first the first calls of all ways, then the later calls.

    ``seconds`` has the measurements of each row, such as ``{"first call: torchrun": [4.1, 4.3, 4.0], …}``. A row of the
    table has their median, their spread, and the ratio of the median to that of ``launch`` in the same kind of call.
    """

    def kind_of_call(name: str) -> str:
        """``first call`` or ``later call``, with which the name of a row begins."""
        return name.partition(": ")[0]

    rows = []
    for name in sorted(seconds, key=kind_of_call):
        measurements = seconds[name]
        median = statistics.median(measurements)
        median_of_launch = statistics.median(seconds[f"{kind_of_call(name)}: {BASE}"])
        rows.append(
            {
                "What": name,
                "Seconds": f"{median:.3g}",
                "Lowest to highest": f"{min(measurements):.3g} to {max(measurements):.3g}",
                "Ratio": f"{median / median_of_launch:.3g}",
                "Calls": str(len(measurements)),
            }
        )
    return rows


def machine() -> list[dict[str, str]]:
    """The table of this machine and its software, as rows: ``[{"What": "cores", "Here": "4"}, …]``.

    Call it before the measurements, because they add to the load that it reports.
    """
    cpu = platform.machine()  # such as x86_64
    if sys.platform == "linux":
        model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if model is not None:
            cpu = model[1]
    load_of_last_minute, _, _ = os.getloadavg()
    values = {
        "CPU": cpu,
        "cores": str(os.cpu_count()),
        "load before the run": f"{load_of_last_minute:.1f}",
        "Python": platform.python_version(),
        "torch": version("torch"),
        "accelerate": version("accelerate"),
        "ipyparallel": version("ipyparallel"),
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
    """Measure all ways to start ranks and print the tables; or, with --way, measure one and print its seconds as JSON.

    ``in_new_interpreter`` starts this file again with --way.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write the tables of book/bench.md")
    parser.add_argument("--trainer", action="store_true", help="measure chapter 11's script, and nothing else")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # users have no use for it
    args = parser.parse_args()
    if args.way:
        # What a library printed may not end with a line break, and the JSON has to be the last line.
        print("\n" + json.dumps(WAYS[args.way]()))
        return
    if args.trainer:
        show(trainer_table())
        return
    tables = {"machine": machine(), "calls": table(measure())}
    for name, rows in tables.items():
        show(rows)
        if args.record:
            write(rows, name)


if __name__ == "__main__":
    main()
