"""``python -m helpers rehearse``: run a script on several ranks of this machine, each with a pretended GPU."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from helpers.command_line import whole
from helpers.ranks.torchrun import folder_until_a_signal

ROOT = Path(__file__).resolve().parents[2]
GRACE = 3  # seconds that a node's ranks have to end by themselves after another node has failed


def add_arguments(command, chapter):
    """Add the arguments of ``rehearse`` to its parser. ``chapter`` is CHAPTER's help."""
    command.add_argument("chapter", metavar="CHAPTER", help=f"{chapter}, or of any script")
    command.add_argument("--gpus", type=whole, default=2, metavar="N", help="pretended GPUs of a node (default: 2)")
    command.add_argument("--nodes", type=whole, default=1, metavar="N", help="pretended nodes (default: 1)")
    command.add_argument("--json", type=Path, metavar="FILE", help="write rank 0's counts there too")
    command.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of the script, after two dashes")


def rehearse(args, flags):
    """Rehearse a chapter, a notebook or a script; return the exit status, 0 or 1."""
    with folder_until_a_signal() as folder:
        script = Path(args.chapter)
        if script.suffix != ".py" or not script.is_file():
            from helpers.export import chapters

            try:
                [script] = chapters.export(args.chapter, folder)
            except chapters.ExportError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
        status = run(script, args.gpus, args.nodes, flags, Path(folder), args.json)
        if status:
            for line in refusals(Path(folder)):
                print(line, file=sys.stderr)
        return status


def run(script, gpus, nodes, flags, folder, counts=None):
    """Run a script under one torchrun for each node and wait; return 0, or 1 where a node failed.

    ``folder`` takes logs and refusals, ``counts`` is the path for rank 0's counts, or None.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = {
        "OMP_NUM_THREADS": str(max(1, cores // (gpus * nodes))),
        "GLOO_SOCKET_IFNAME": loopback,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "REHEARSAL_GPUS": str(gpus),
        "REHEARSAL_FOLDER": str(folder),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if counts:
        environment["REHEARSAL_JSON"] = str(counts.absolute())
    options = [f"--nproc-per-node={gpus}", f"--nnodes={nodes}", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"]
    store, endpoint = meeting_point(nodes)
    options += [f"--rdzv-endpoint={endpoint}", f"--log-dir={folder}", "--rdzv-id=rehearsal"]
    if store:
        options.append("--rdzv-conf=is_host=false")
    command = [sys.executable, "-m", "helpers.rehearsal.node", *options, "-m", "helpers.rehearsal.rank", str(script)]
    agents = [subprocess.Popen([*command, *flags], env=environment) for _ in range(nodes)]
    return wait(agents)


def meeting_point(nodes):
    """(a store, its address). This process serves it for several nodes; the torchrun of one node serves its own."""
    if nodes == 1:
        return None, "127.0.0.1:0"
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, f"127.0.0.1:{store.port}"


def wait(agents):
    """Wait for all agents; return 0, or 1 where one failed: the others are ended, GRACE seconds later at the latest."""
    failed = False
    while agents:
        for agent in list(agents):
            try:
                failed |= agent.wait(timeout=GRACE if failed else 0.2) != 0
                agents.remove(agent)
            except subprocess.TimeoutExpired:
                if failed:
                    end(agent)
                    agents.remove(agent)
    return int(failed)


def end(agent):
    """End a node's torchrun and its ranks: each rank has its own process group, so one signal does not reach all."""
    ranks = psutil.Process(agent.pid).children(recursive=True)
    agent.terminate()  # torchrun ends its ranks at it
    psutil.wait_procs(ranks, timeout=GRACE)
    for process in [psutil.Process(agent.pid), *ranks]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    agent.wait()


def refusals(folder):
    """A line for each place in the script where GPUs or NCCL would have raised, with the ranks that came there."""
    ranks = {}
    for path in sorted(folder.glob("refused-*.json")):
        last = json.loads(path.read_text())[-1]
        ranks.setdefault((last["line"], last["error"]), []).append(int(path.stem.partition("-")[2]))
    return [f"{line}: {error} (ranks {sorted(found)})" for (line, error), found in ranks.items()]
