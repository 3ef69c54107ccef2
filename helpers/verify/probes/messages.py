"""Mistakes on purpose: what PyTorch, CUDA and NCCL print about them, and whether the book quotes it correctly."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from helpers.ranks import processes
from helpers.ranks.ports import hold_port
from helpers.verify.probes.results import Text
from helpers.verify.record import Figure

LIMIT = 75  # seconds for all programs together: they mostly wait, so they run at the same time
LIMIT_ON_CPU = 40
# How many characters are kept of the beginning and of the end of what a program printed.
BEGINNING = 1000
END = 2000

TWO_RANKS_ON_ONE_GPU = (
    "Duplicate GPU detected",
    "Multiple ranks detected using the same GPU on this node",  # NCCL 2.30.3 and 2.30.4
    "Multiple Ranks are using the same GPU/Partition",  # newer ones
    "Failed to initialize NCCL communicator",  # PyTorch 2.15, which does not quote NCCL's words
    "ProcessGroupNCCL is bound to device",  # PyTorch 2.15, where each rank has a GPU and uses that of another one
)


@dataclass(frozen=True)
class Mistake:
    """A program that makes a mistake, and the message that it should print."""

    name: str
    code: str  # inserted into PROGRAM
    expected: tuple[str, ...]  # The program should print one of these.
    ranks: int = 1


MISTAKES = (
    Mistake(
        "two ranks on one GPU",
        "torch.cuda.set_device(0)\n"
        "dist.init_process_group('nccl')\n"
        "x = torch.ones(1, device='cuda')\n"
        "dist.all_reduce(x)\n"
        "print(x)",
        TWO_RANKS_ON_ONE_GPU,
        ranks=2,
    ),
    Mistake(
        "two ranks bound to one GPU",
        "dist.init_process_group('nccl', device_id=torch.device('cuda', 0))\n"
        "dist.all_reduce(torch.ones(1, device='cuda'))",
        TWO_RANKS_ON_ONE_GPU,
        ranks=2,
    ),
    Mistake(
        "a GPU that the machine lacks",
        "torch.ones(1, device=torch.device('cuda', torch.cuda.device_count()))",
        ("CUDA error: invalid device ordinal",),
    ),
    Mistake(
        "a CPU tensor on NCCL",
        "dist.init_process_group('nccl')\ndist.all_reduce(torch.ones(1))",
        ("No backend type associated with device type cpu",),
    ),
    Mistake(
        "BAND on NCCL",
        "dist.init_process_group('nccl')\n"
        "dist.all_reduce(torch.ones(1, dtype=torch.int32, device='cuda'), op=dist.ReduceOp.BAND)",
        ("Cannot use ReduceOp.BAND with NCCL",),
    ),
    Mistake(
        "a tensor that is not contiguous, on NCCL",
        "dist.init_process_group('nccl')\ndist.all_reduce(torch.ones(4, 4, device='cuda').t()[1:])",
        ("Tensors must be contiguous",),
    ),
    Mistake(
        "a fork after the first use of CUDA",
        "import os\n"
        "torch.ones(1, device='cuda')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    torch.ones(1, device='cuda')\n"
        "os.waitpid(child, 0)",
        ("Cannot re-initialize CUDA in forked subprocess",),
    ),
    Mistake(
        "more memory than the GPU has",
        "torch.empty(1 << 42, dtype=torch.uint8, device='cuda')",
        ("CUDA out of memory. Tried to allocate",),
    ),
    Mistake(
        "a GPU's tensor as a NumPy array",
        "torch.ones(1, device='cuda').numpy()",
        ("can't convert cuda:0 device type tensor to numpy",),
    ),
    Mistake(
        "a kernel that outlasts the group's timeout of 5 s",
        "from datetime import timedelta\n"
        "dist.init_process_group('nccl', timeout=timedelta(seconds=5))\n"
        "x = torch.ones(1, device='cuda')\n"
        "dist.all_reduce(x)\n"
        "torch.cuda._sleep(60_000_000_000)\n"
        "dist.all_reduce(x)\n"
        "torch.cuda.synchronize()",
        ("Watchdog caught collective operation timeout",),
    ),
    Mistake(
        "a group that is not destroyed",
        "dist.init_process_group('nccl')\ndist.all_reduce(torch.ones(1, device='cuda'))\nraise SystemExit",
        ("WARNING: destroy_process_group() was not called before program exit",),
    ),
)
PROGRAM = """\
import torch
import torch.distributed as dist

{code}
if dist.is_initialized():
    dist.destroy_process_group()
"""


def messages(device: torch.device) -> Iterator[Figure | Text]:
    """Yields what the program of each mistake printed, and then whether that is what the book quotes.

    On a CPU all programs fail because there is no GPU, so the first two are enough to try this function.
    """
    mistakes: Sequence[Mistake] = MISTAKES
    limit = LIMIT
    if device.type == "cpu":
        mistakes = MISTAKES[:2]
        limit = LIMIT_ON_CPU
    outputs = run_all(mistakes, limit)
    for mistake in mistakes:
        yield Text(mistake.name, shortened(outputs[mistake.name]))
    for mistake in mistakes:
        as_quoted = any(words in outputs[mistake.name] for words in mistake.expected)
        yield Figure(f"{mistake.name}: printed as the book quotes it", float(as_quoted), "of 1")


def shortened(output: str) -> str:
    """An output, of which only the beginning and the end are kept if it is long."""
    if len(output) <= BEGINNING + END:
        return output
    return f"{output[:BEGINNING]}\n...\n{output[-END:]}"


@dataclass(frozen=True)
class StartedRank:
    """A rank of a mistake's program, and the file that it prints to."""

    mistake: Mistake
    process: psutil.Process
    log: Path


def run_all(mistakes: Sequence[Mistake], limit: float) -> dict[str, str]:
    """Run the programs of all mistakes at the same time, and kill those that still run after ``limit`` seconds.

    Returns {the mistake's name: what the ranks of its program printed, one after the other}.
    """
    started: list[StartedRank] = []
    # The ports and the open files are kept until all programs have ended.
    with tempfile.TemporaryDirectory() as folder, ExitStack() as kept_open:
        for mistake in mistakes:
            port = kept_open.enter_context(hold_port())
            for rank in range(mistake.ranks):
                log = Path(folder, str(len(started)))
                log_file = kept_open.enter_context(log.open("w"))
                process = processes.start(
                    [sys.executable, "-c", PROGRAM.format(code=mistake.code)],
                    env={**os.environ, **variables(rank, mistake.ranks, port)},
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=log_file,
                )
                started.append(StartedRank(mistake, process, log))
        all_processes = [started_rank.process for started_rank in started]
        # {place in the list: exit status} of those that have ended
        statuses = processes.wait(all_processes, timeout=limit)
        processes.end(all_processes, grace=0)

        outputs = {mistake.name: "" for mistake in mistakes}
        for place, started_rank in enumerate(started):
            name = started_rank.mistake.name
            was_killed = place not in statuses
            if was_killed:
                outputs[name] += f"(killed after {limit} s)\n"
            outputs[name] += started_rank.log.read_text("utf-8", "replace")
    return outputs


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment variables of one of ``ranks`` ranks, as torchrun would set them, but with one GPU for all.

    NCCL_DEBUG makes NCCL print its warnings, which the book quotes.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_DEBUG": "WARN",
        "OMP_NUM_THREADS": "1",
    }
