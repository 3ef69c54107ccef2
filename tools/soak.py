"""Run a script many times on 2 and on 4 ranks, and count how its runs end (``make soak``).

The script is a chapter's. With ``--ends`` it is a small DDP script that ends in several ways: with stop_process_group
and without, with an exception on one rank, and with ``sys.exit(3)`` on one rank.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

TIMEOUT = 120  # seconds for one run
WELL = "ended well"

# A hang needs gradients in several buckets, a model that a function still holds, and a group that ends at once after
# backward (pytorch#190489). Each run makes twenty groups, because the first one seldom hangs. SIGALRM ends a hang.
JOB = """
    import os
    import signal
    import sys

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    from helpers.runtime.process_group import stop_process_group

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


    def live(number, end, fault):
        signal.alarm(30)
        store = dist.PrefixStore(str(number), agent)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        model = DDP(layers, bucket_cap_mb=0.001)
        for step in range(3):
            model(torch.ones(4, 8)).sum().backward()
            if step == 1 and rank == 1 and fault == "raise":
                raise ValueError("rank 1 cannot go on")
            if step == 1 and rank == 1 and fault == "exit":
                sys.exit(3)
        signal.alarm(15)
        if end == "stop":
            stop_process_group()
        if end == "barrier":
            dist.barrier()
        if end in ("barrier", "destroy"):
            dist.destroy_process_group()


    for number in range(1 if sys.argv[1] == "nothing" else 20):
        live(number, *sys.argv[1:])
    signal.alarm(15)
"""
ENDS = {  # {the script's arguments: how the first failed rank may end; None where ends are only counted}
    ("stop", "no-fault"): {WELL},
    ("stop", "raise"): {"rank 1: 1", "a peer: 1"},
    ("stop", "exit"): {"rank 1: 3", "a peer: 1"},
    ("barrier", "no-fault"): None,
    ("destroy", "no-fault"): None,
    ("nothing", "no-fault"): None,
}


def hung(*_):
    raise TimeoutError


def run(script, nproc, flags, logs):
    """Run a script with this process as torchrun's agent. Returns how the first failed rank ended, or WELL."""
    config = LaunchConfig(
        *(1, 1, nproc),
        run_id="soak",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.05,
        logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.ALL),
    )
    signal.alarm(TIMEOUT)
    try:
        elastic_launch(config, sys.executable)(str(script), *flags)
    except TimeoutError:
        return f"hung for {TIMEOUT} s"
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == -signal.SIGALRM:
            return "hung at a group's end"
        return f"{'rank 1' if rank == 1 else 'a peer'}: {failure.exitcode}"
    finally:
        signal.alarm(0)
    left = psutil.Process().children()
    return f"left {left}" if left else WELL


def soak(script, nproc, runs, flags=(), expected=frozenset({WELL})):
    """Run the script ``runs`` times; return how many runs ended in a way that is not in ``expected``."""
    counts, wrong, start = Counter(), 0, time.monotonic()
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as logs:
            how = run(script, nproc, flags, logs)
            counts[how] += 1
            if expected and how not in expected:
                wrong += 1
                print(how, *(path.read_text() for path in Path(logs).rglob("std*.log")), sep="\n", flush=True)
    each = (time.monotonic() - start) / runs
    summary = ", ".join(f"{count} x {how}" for how, count in sorted(counts.items()))
    print(f"{Path(script).stem} {' '.join(flags):16} {nproc} ranks: {summary} ({each:.1f} s each)", flush=True)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chapter", default="04", help="a chapter's number or name, or a notebook's path (04)")
    parser.add_argument("--runs", type=int, default=40, help="how often, on each number of ranks (40)")
    parser.add_argument("--ends", action="store_true", help="compare the ends of a small script instead")
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, hung)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    with tempfile.TemporaryDirectory() as folder:
        if not args.ends:
            export = [sys.executable, "-m", "helpers", "export", args.chapter, "--out", folder]
            script = subprocess.check_output(export, text=True).strip()
            return sum(soak(script, nproc, args.runs) for nproc in (2, 4))
        script = Path(folder) / "job.py"
        script.write_text(textwrap.dedent(JOB))
        jobs = [(nproc, *job) for nproc in (2, 4) for job in ENDS.items()]
        return sum(soak(script, nproc, args.runs, flags, expected) for nproc, flags, expected in jobs)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
