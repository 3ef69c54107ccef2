"""``python -m helpers doctor`` in each rank: try what a training run will need, and say what is wrong."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist

from helpers.doctor.membership import REPORT_SECONDS, Membership, MembershipError, open_store, plain
from helpers.doctor.report import report
from helpers.doctor.this_rank import facts_of_rank
from helpers.doctor.trials import collectives, rounds_of_pairs, try_alone, try_collective, try_link, try_plan

CONNECT_SECONDS = 5  # seconds to wait for another rank's address to answer


def unreachable(addresses):
    """[(rank, the reason)] for each rank of {rank: (address, port)} that accepts no connection."""

    def answers(address):
        try:
            socket.create_connection(address, timeout=CONNECT_SECONDS).close()
        except OSError as error:
            return str(error.strerror or error)

    with ThreadPoolExecutor(32) as pool:
        reasons = zip(addresses, pool.map(answers, addresses.values()), strict=True)
        return [(rank, reason) for rank, reason in reasons if reason]


def mutually_reachable(members, addresses, unreached):
    """The members that all reach each other, taken in order: a group with an unreachable rank would hang at its start.

    ``addresses`` is {rank: (address, port)}, ``unreached`` is {rank: {a rank that it cannot reach: the reason}}.
    """
    chosen = []
    for rank in members:
        if addresses[rank][0] and not any(rank in unreached[other] or other in unreached[rank] for other in chosen):
            chosen.append(rank)
    return chosen or members


def try_links(membership):
    """{(rank, rank): [right, seconds, bytes per second]} of every pair of members.

    ``right`` says whether both got the right data; the numbers are those of the slower rank of the two.
    """
    links, members = {}, membership.members
    for number, pairs in enumerate(rounds_of_pairs(len(members)), 1):
        pairs = [(members[a], members[b]) for a, b in pairs if {members[a], members[b]} <= set(membership.members)]
        peers = {a: b for a, b in pairs} | {b: a for a, b in pairs}

        def talk(peer):
            if peer is None:
                return None  # of an odd number of members, one has no peer in each round
            try:
                return try_link(membership.members.index(peer), membership.device)
            except Exception as error:
                raise RuntimeError(f"with rank {peer}: {plain(error)}") from None

        if not membership.ready:
            break
        found = membership.attempt(f"round {number} of the links", partial(talk, peers.get(membership.rank)))
        for pair in pairs:
            if both := [found[rank] for rank in pair if found.get(rank)]:
                right, times, speeds = zip(*both, strict=True)
                links[pair] = [all(right) and len(both) == 2, max(times), min(speeds)]
    return links


def examine(membership, place, backend, plan=None):
    """Try everything with the other ranks. Returns the findings for ``report``: one dict, the same on every rank.

    ``plan`` is what ``read_plan`` returned: then the ranks also measure what the plan counts on.
    """
    known = facts_of_rank(place, backend)
    with contextlib.ExitStack() as listeners:
        with contextlib.suppress(OSError, TypeError):  # this host lacks the address: the others will report that
            family = socket.AF_INET6 if ":" in known["address"] else socket.AF_INET
            listener = socket.create_server((known["address"], 0), family=family, backlog=4096)
            known["port"] = listeners.enter_context(listener).getsockname()[1]
        infos = membership.gather("roll call", known, membership.timeout)
        listening = {rank: (info["address"], info.get("port", 9)) for rank, info in infos.items()}
        others = {rank: address for rank, address in listening.items() if address[0] and rank != membership.rank}
        unreached = membership.attempt("connecting by TCP", lambda: unreachable(others))
        unreached = {rank: dict(refusals or ()) for rank, refusals in unreached.items()}
    membership.restrict_to(mutually_reachable(membership.members, listening, unreached))
    gpu_ids = [info["gpu_id"] for info in infos.values()]
    if all(gpu_ids) and len(set(gpu_ids)) == len(gpu_ids):
        membership.backend, membership.device = "nccl", torch.device(known["device"])
        torch.cuda.set_device(membership.device)
    backend = membership.backend
    membership.start_group()
    tried = {}
    for name in collectives(1, torch.device("cpu")) if membership.ready else []:
        if membership.ready:
            tried[name] = membership.attempt(name, partial(try_collective, name, membership.device))
    links = try_links(membership)
    speeds = membership.attempt("computing alone", partial(try_alone, membership.device))
    measured = {}
    if plan and membership.ready:
        hosts = [infos[rank]["host"] for rank in membership.members]
        measured = membership.attempt("what the plan counts on", partial(try_plan, plan, hosts, membership.device))
    skews = membership.gather("the end", membership.skew)
    return {
        "world_size": place["WORLD_SIZE"],
        "timeout": membership.timeout,
        "master": (place["MASTER_ADDR"], place["MASTER_PORT"]),
        "backend": backend,
        "device": membership.device.type,
        "infos": infos,
        "members": membership.members,
        "lost": membership.lost,
        "errors": membership.errors,
        "unreached": unreached,
        "collectives": tried,
        "links": links,
        "alone": speeds,
        "skews": skews,
        "plan": plan,
        "measured": measured,
    }


def run_rank(place, backend=None, timeout=60, plan=None):
    """Examine the ranks, as one of them; the leader prints the report. Returns the exit status: 0, or 1 for a problem.

    ``place`` is from ``find_place``; ``backend`` is "gloo" or None; ``timeout`` is in seconds; ``plan`` is what
    ``read_plan`` returned, or None.
    """
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # with it a timeout raises and does not end the process
    rank, server = place["RANK"], f"{place['MASTER_ADDR']}:{place['MASTER_PORT']}"
    status, reason = 1, None
    try:
        store, serves = open_store(place, timeout)
        membership = Membership(store, rank, place["WORLD_SIZE"], timeout)
        try:
            text, status = report(examine(membership, place, backend, plan))
            if membership.rank == membership.leader:
                print(text, flush=True)
            membership.gather("goodbye", None)
        except MembershipError as error:
            reason = error
        store.set(f"gone/{rank}", "")
        if serves:  # the store has to live until the last rank has left
            membership.wait_for(["goodbye/all"], time.monotonic() + 5 * timeout)
            membership.wait_for([f"gone/{member}" for member in membership.members], time.monotonic() + REPORT_SECONDS)
    except MembershipError as error:
        reason = error
    except dist.DistError as error:
        reason = f"The store at {server} went away ({plain(error)}). Look at the output of the rank that served it."
    if reason:
        print(f"rank {rank} on {socket.gethostname()}: {reason}", file=sys.stderr, flush=True)
        return 1
    if status and "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun prints a long report for each rank that fails or is stopped: one rank of each host is enough.
        status = int(place["LOCAL_RANK"] == 0)
        if status:
            with contextlib.suppress(dist.DistError):  # the store may end with the first host
                membership.wait_for([f"gone/{one}" for one in membership.members], time.monotonic() + REPORT_SECONDS)
            time.sleep(0.5)
    return status


def start_local(nproc, flags):
    """Start the doctor on ``nproc`` ranks of this machine, as torchrun would, and return the worst exit status."""
    nproc = nproc or torch.cuda.device_count() or 2
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": str(max(1, cores // nproc)),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
    }
    started = []
    for rank in range(nproc):
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", "helpers", "doctor", *flags]
        started.append(subprocess.Popen(command, env=environment, process_group=0))  # Ctrl-C reaches this process alone
    failed = [rank for rank, process in enumerate(started) if process.wait()]
    print("\nThat was this machine alone. On a cluster, start it in every rank:")
    print("  torchrun ... -m helpers doctor    or    srun python -m helpers doctor")
    return int(bool(failed))
