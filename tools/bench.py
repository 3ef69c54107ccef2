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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
BASE = "launch"  # the way with which the table compares the others
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
Seconds = dict[str, list[float]]  # {name of a row of the table: its measurements}


# --- the same work for all: an all-reduce of a small tensor, its result brought back ----------------------------------


def all_reduce() -> float:
    """All-reduce a tensor that holds rank + 1, in a process group that runs already; return the sum, 1 + 2 + … + N."""
    import torch
    import torch.distributed as dist

    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def start_group(rank: int, store: str) -> None:
    """Start a process group of NPROC ranks. They find each other by the file ``store``, which need not exist yet."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NPROC)


def with_group(rank: int, store: str) -> float:
    """Start a process group by the file ``store``, ``all_reduce`` in it, and end the group; return the sum."""
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
    """Call a function so many times; return how long each call took.

    The function returns what ``all_reduce`` returned on each rank. Raises AssertionError if that is wrong.
    """
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        totals = call()
        seconds.append(time.perf_counter() - start)
        assert totals == [TOTAL] * NPROC, totals
    return seconds


def first_and_later(way: str, seconds: list[float]) -> Seconds:
    """Two rows of the table, one for the first call of a way to start ranks, and one for its later calls.

    The first call may be slower, because some ways start processes there that the later calls use again.
    """
    return {f"first call: {way}": seconds[:1], f"later call: {way}": seconds[1:]}


def time_launch() -> Seconds:
    """Measure this project's ``launch``, whose forkserver is started before, as in a chapter."""
    from helpers.ranks.launch import launch, warm

    def launch_and_all_reduce() -> list[float]:
        return launch(all_reduce, nproc=NPROC)

    warm()  # as `%load_ext helpers` does in a chapter's first cell
    use_openmp()
    seconds = seconds_of(launch_and_all_reduce, calls=8)
    return first_and_later("launch", seconds)


def put_total(rank: int, store: str, queue: SimpleQueue) -> None:
    """Do what ``with_group`` does, and put (rank, sum) into a queue: for ways that drop what a rank returns."""
    queue.put((rank, with_group(rank, store)))


def totals_in(queue: SimpleQueue) -> list[float]:
    """Wait until all ranks have put their sums into a queue; return ``[rank 0's, rank 1's, …]``."""
    totals = {}
    for _ in range(NPROC):
        rank, total = queue.get()
        totals[rank] = total
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


# The script that torchrun runs on each rank. Its argument is a folder, to which the ranks write their results.
RANK_SCRIPT = f"""\
import os
import pathlib
import sys

sys.path.insert(0, {str(ROOT / "tools")!r})
import bench

rank = int(os.environ["RANK"])
folder = pathlib.Path(sys.argv[1])
total = bench.with_group(rank, folder / "store")
(folder / str(rank)).write_text(str(total))
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

        def on_engines(function: str, arguments_of_ranks: list[list]) -> list:
            """Call a function of this file on each engine, as one rank; return what it returned there, by rank.

            ``arguments_of_ranks`` has the arguments with which each rank calls it.
            """
            replies = []
            for rank, arguments in enumerate(arguments_of_ranks):
                engine = client[rank]
                replies.append(engine.apply_async(call_on_engine, str(ROOT / "tools"), function, arguments))
            return [reply.get(timeout=60) for reply in replies]

        no_arguments: list[list] = [[] for _ in range(NPROC)]
        store_numbers = itertools.count()

        def all_reduce_in_new_group() -> list[float]:
            # Each group needs a new file, by which its ranks find each other.
            store = f"{folder}/store{next(store_numbers)}"
            return on_engines("with_group", [[rank, store] for rank in range(NPROC)])

        def all_reduce_in_kept_group() -> list[float]:
            return on_engines("all_reduce", no_arguments)

        on_engines("use_one_thread", no_arguments)
        seconds_of(all_reduce_in_new_group, calls=1)
        first_call = time.perf_counter() - before_first_call
        later_calls = seconds_of(all_reduce_in_new_group, calls=8)

        store_of_kept_group = f"{folder}/kept"
        on_engines("start_group", [[rank, store_of_kept_group] for rank in range(NPROC)])
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

STEPS_OF_PIECE = 10  # The two loops take turns, and each turn, called a piece, has so many steps.


@dataclass(frozen=True)
class ModelSize:
    """A model with which the script and the loop by hand are compared."""

    name: str
    width: int  # of its hidden layers
    added_layers: int  # hidden layers that the script's own model does not have
    num_pieces: int  # how many pieces of each loop are measured


MODEL_SIZES = [
    ModelSize("20 thousand weights, the script's own", width=256, added_layers=0, num_pieces=30),
    ModelSize("4 million weights", width=1024, added_layers=4, num_pieces=20),
    ModelSize("17 million weights", width=2048, added_layers=4, num_pieces=10),
]
CLOCKS = {"processor": time.process_time, "wall": time.perf_counter}


@dataclass
class PieceTimes:
    """How long each piece of the two loops took on one rank, in seconds by one clock."""

    script: list[float] = field(default_factory=list)
    by_hand: list[float] = field(default_factory=list)


def read_clocks() -> dict[str, float]:
    """The seconds that each of CLOCKS shows now."""
    return {name: clock() for name, clock in CLOCKS.items()}


def seconds_since(start: dict[str, float]) -> dict[str, float]:
    """The seconds that have passed by each of CLOCKS since ``read_clocks`` returned ``start``."""
    return {name: now - start[name] for name, now in read_clocks().items()}


def import_script(path: str) -> Any:
    """Import a chapter's script, which is a file and no package, as a module; return the module."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("trainer", path)
    assert spec is not None and spec.loader is not None
    trainer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trainer)
    return trainer


def loop_by_hand(trainer: Any, args: Any) -> Callable[[], None]:
    """Return a function that trains for one piece each time it is called, without what a short experiment leaves out.

    It has DDP, clipping and a schedule, as the script has, but no checkpoints, no agreement on a stop, and so on. Data,
    model and optimizer are made by the script, ``trainer``, with its arguments ``args``.
    """
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

    def batches_of_all_epochs() -> Iterator[Any]:
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            yield from loader

    batches = batches_of_all_epochs()

    def train_one_piece() -> None:
        total_loss = torch.zeros(())
        for images, labels in itertools.islice(batches, STEPS_OF_PIECE):
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            optimizer.step()
            schedule.step()
            total_loss += loss.detach()
        dist.all_reduce(total_loss)

    return train_one_piece


def use_larger_model(trainer: Any, size: ModelSize) -> None:
    """Replace the script's function ``build_model`` by one that builds a model of this size."""
    from torch import nn

    def build_model(args: Any) -> nn.Module:
        first = nn.Sequential(nn.Linear(64, size.width), nn.ReLU())
        added = [nn.Sequential(nn.Linear(size.width, size.width), nn.ReLU()) for _ in range(size.added_layers)]
        return nn.Sequential(*first, *added, nn.Linear(size.width, 10))

    trainer.build_model = build_model


def time_trainer(script: str, size: ModelSize) -> dict[str, PieceTimes]:
    """On a rank: train with the script and by hand, in turns; return {name of a clock: the times of the pieces}.

    Both loops train in this one process, and so in the same minute, which may be a slow one. The script's ``train``
    runs as it is, but its ``take_step`` is replaced: before each piece of the script, the loop by hand has its turn.
    """
    from unittest import mock

    import torch
    import torch.distributed as dist

    trainer = import_script(script)
    steps = STEPS_OF_PIECE * size.num_pieces + 1  # in the last one, the time of the last piece is noted
    flags = ["--max-steps", str(steps), "--log-every", str(STEPS_OF_PIECE), "--width", str(size.width)]
    flags += ["--val-every", "1000000"]  # never
    with mock.patch("sys.argv", [script, *flags]):
        args = trainer.parse_args()
    if size.added_layers > 0:
        use_larger_model(trainer, size)

    train_one_piece_by_hand = loop_by_hand(trainer, args)
    train_one_piece_by_hand()  # to warm up
    times = {clock: PieceTimes() for clock in CLOCKS}
    start_of_script_piece: dict[str, float] = {}  # what each clock showed then; empty before the first piece
    own_take_step = trainer.take_step

    def take_step(training: Any, micro_batches: list, step: int, args: Any) -> Any:
        """Take a step of the script. Before the first step of a piece, let the loop by hand train a piece."""
        is_first_of_piece = step % STEPS_OF_PIECE == 1
        if is_first_of_piece:
            # The script has just ended its last piece.
            if start_of_script_piece:
                for clock, seconds in seconds_since(start_of_script_piece).items():
                    times[clock].script.append(seconds)

            dist.barrier()
            start_by_hand = read_clocks()
            train_one_piece_by_hand()
            for clock, seconds in seconds_since(start_by_hand).items():
                times[clock].by_hand.append(seconds)

            dist.barrier()
            start_of_script_piece.update(read_clocks())
        return own_take_step(training, micro_batches, step, args)

    trainer.take_step = take_step
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(None):
        trainer.train(args, torch.device("cpu"))
    return times


def sum_over_ranks(times_of_ranks: Sequence[PieceTimes]) -> PieceTimes:
    """The times of all ranks together: the first piece's time on each rank added up, the second piece's, and so on."""
    script = [times.script for times in times_of_ranks]
    by_hand = [times.by_hand for times in times_of_ranks]
    return PieceTimes(
        script=[sum(piece) for piece in zip(*script, strict=True)],
        by_hand=[sum(piece) for piece in zip(*by_hand, strict=True)],
    )


def trainer_row(size: ModelSize, times_of_ranks: Sequence[dict[str, PieceTimes]]) -> dict[str, str]:
    """The table's row of a model, {column: text}. ``times_of_ranks`` has what ``time_trainer`` returned on each rank.

    By the clock of the processor, the time is that of all ranks together.
    """
    row = {"Model": size.name}
    for clock in CLOCKS:
        times = sum_over_ranks([times_of_rank[clock] for times_of_rank in times_of_ranks])
        # The last piece by hand has no partner, because the script ends before its next piece.
        pairs = zip(times.by_hand, times.script, strict=False)
        ratios = [by_hand / script for by_hand, script in pairs]
        seconds_by_hand = statistics.median(times.by_hand) / STEPS_OF_PIECE / len(times_of_ranks)
        row[f"Speed, {clock} time"] = f"{statistics.median(ratios):.3f}"
        row[f"ms a step by hand, {clock}"] = f"{seconds_by_hand * 1000:.1f}"
    row["Pieces"] = f"{size.num_pieces} of {STEPS_OF_PIECE} steps"
    return row


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
        for size in MODEL_SIZES:
            times_of_ranks = launch(time_trainer, str(script), size, nproc=2, timeout=3600)
            rows.append(trainer_row(size, times_of_ranks))
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
    """Make the table of the measurements; return its rows, {column: text}: the first calls, and below the later calls.

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
        # A line such as "model name      : AMD EPYC 7763 64-Core Processor".
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
    column_names = list(rows[0])
    texts = [column_names]
    for row in rows:
        texts.append(list(row.values()))
    all_columns = range(len(column_names))
    for line in aligned(texts, left=all_columns):
        print(line)


def write(rows: list[dict[str, str]], name: str) -> None:
    """Write rows to bench_NAME.csv, a table that book/bench.md shows."""
    path = RECORDED / f"bench_{name}.csv"
    column_names = list(rows[0])
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, column_names, lineterminator="\n")
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
        measure_way = WAYS[args.way]
        seconds = measure_way()
        # What a library printed may not end with a line break, and the JSON has to be the last line.
        print("\n" + json.dumps(seconds))
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
