"""The doctor in each rank: try what a training run will need, and say what is wrong."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist

from helpers.doctor import trials
from helpers.doctor.facts import Facts, facts_of_rank
from helpers.doctor.findings import Findings
from helpers.doctor.membership import (
    REPORT_SECONDS,
    LaunchedRank,
    Membership,
    MembershipError,
    open_store,
    plain,
    serves_store,
)
from helpers.doctor.plan import Plan
from helpers.doctor.report import report
from helpers.doctor.trials import Speeds, Trial
from helpers.ranks import processes
from helpers.ranks.rank import rank_variables
from helpers.ranks.torchrun import set_defaults

REPORT_IS_PRINTED = "the report is printed"  # the last step, after which no rank needs another one
CLOCK_READINGS = 5
CONNECTIONS_AT_ONCE = 32
CONNECT_SECONDS = 5  # timeout of a TCP connection
WAITING_CONNECTIONS = 4096  # All ranks connect to a port at once, and nobody accepts the connections.


def run_rank(launched: LaunchedRank, backend: str | None = None, timeout: float = 60, plan: Plan | None = None) -> int:
    """Run the doctor on this rank, while the other ranks do the same. The lowest one that answers prints the report.

    ``launched`` has the numbers that the launcher gave this rank. ``backend`` is "gloo" to leave the GPUs out. A rank
    waits for another one for ``timeout`` seconds. Returns the exit status: 1 for a problem, or if this rank could not
    take part. Under torchrun only one rank of each host returns 1 for a problem.
    """
    # With this variable a collective that times out raises an error. Without it NCCL's watchdog would end the process.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    try:
        store = open_store(launched, timeout)
        membership = Membership(store, launched.rank, launched.world_size, timeout)
        # Rank 0 may serve the store in its own process. This context keeps it alive while other ranks use the store.
        with store_for_all(membership, launched):
            has_problems = print_report(membership, launched, backend, plan)
    except MembershipError as error:
        return refuse(launched, str(error))
    except dist.DistError as error:
        what = f"The store at {launched.host} went away ({plain(error)})."
        return refuse(launched, f"{what} Look at the rank that served it.")

    if not has_problems:
        return 0
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if under_torchrun:
        return fail_under_torchrun(membership, launched)
    return 1


def fail_under_torchrun(membership: Membership, launched: LaunchedRank) -> int:
    """Return the exit status of this rank after a report with problems: 1 on one rank of each host, 0 on the others.

    torchrun prints a long report for each rank that fails, and stops the other ranks of its host at once. So only local
    rank 0 fails, and it first waits until the other ranks have ended their work.
    """
    if launched.local_rank > 0:
        return 0
    wait_until_all_are_gone(membership)
    # A rank writes that it is gone shortly before its process ends. torchrun should not stop it in between.
    time.sleep(0.5)
    return 1


def print_report(membership: Membership, launched: LaunchedRank, backend: str | None, plan: Plan | None) -> bool:
    """Examine with the other ranks, print the report on the lowest one, and return whether it has problems."""
    findings = examine(membership, launched, backend, plan)
    result = report(findings, plan)
    try:
        lowest_rank = findings.members[0]
        if launched.rank == lowest_rank:
            print(result.text, flush=True)
    finally:
        # No rank ends before the report is printed, because a launcher may stop all ranks when one of them has failed.
        membership.gather(REPORT_IS_PRINTED, answer=None)
    return result.problems > 0


@contextlib.contextmanager
def store_for_all(membership: Membership, launched: LaunchedRank) -> Iterator[None]:
    """A context in which the ranks use their store. The rank that serves it leaves the context last.

    The store ends with the process that serves it. So each rank that leaves the context writes into the store that it
    no longer needs it, and the serving rank waits until all others have done so.
    """
    try:
        yield
    finally:
        membership.store.set(f"gone/{launched.rank}", "")
        if serves_store(launched):
            # If this rank was too slow, the others have gone on without it, but they still need its store.
            membership.wait_for([f"{REPORT_IS_PRINTED}/all"], 5 * membership.timeout)
            wait_until_all_are_gone(membership)


def refuse(launched: LaunchedRank, reason: str) -> int:
    """Print why this rank cannot take part, and return its exit status."""
    print(f"rank {launched.rank} on {socket.gethostname()}: {reason}", file=sys.stderr, flush=True)
    return 1


def wait_until_all_are_gone(membership: Membership) -> None:
    """Wait until all members have written that they no longer need the store, for at most REPORT_SECONDS."""
    membership.wait_for([f"gone/{rank}" for rank in membership.members], REPORT_SECONDS)


def examine(membership: Membership, launched: LaunchedRank, backend: str | None, plan: Plan | None = None) -> Findings:
    """Try with the other ranks what a training run will need, and if there is a plan, what it counts on.

    All ranks call this together, and it returns the same findings on each. Each step needs what the steps before it
    have tried: the store, TCP connections, a process group and its collectives, the link of each pair of ranks.
    """
    with listening_port() as port:
        own_facts = facts_of_rank(launched, port, backend)
        facts = membership.gather("roll call", own_facts, patience=membership.timeout)
        clock_offsets = compare_clocks(membership)
        unreachable = try_connections(membership, facts)

    if each_has_a_gpu(facts):
        membership.backend = "nccl"
        membership.device = torch.device(own_facts.device)
        torch.cuda.set_device(membership.device)
    backend_at_start = membership.backend  # If NCCL fails, the trials go on with gloo.
    if any(unreachable.values()):
        membership.backend = ""  # No process group is started: it would wait for these connections until its timeout.
    membership.start_group()

    collectives = try_collectives(membership)
    links = try_links(membership)
    compute_alone = partial(trials.try_matmul, "float32", membership.device)
    compute_speeds = membership.attempt("computing alone", compute_alone)
    plan_speeds = {}
    if plan is not None:
        hosts = [facts[rank].host for rank in membership.members]
        plan_speeds = try_plan(membership, plan, hosts)
    return Findings(
        world_size=launched.world_size,
        timeout=membership.timeout,
        store_address=f"{launched.host}:{launched.port}",
        backend=backend_at_start,
        device=membership.device.type,
        facts=facts,
        members=membership.members,
        lost=membership.lost,
        errors=membership.errors,
        unreachable=unreachable,
        clock_offsets=clock_offsets,
        collectives=collectives,
        links=links,
        compute_speeds=compute_speeds,
        plan_speeds=plan_speeds,
    )


def each_has_a_gpu(facts: Mapping[int, Facts]) -> bool:
    """Whether every rank has a GPU of its own."""
    gpu_ids = {rank_facts.gpu_id for rank_facts in facts.values()}
    return "" not in gpu_ids and len(gpu_ids) == len(facts)


# --- connections ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening_port() -> Iterator[int]:
    """A context in which a port of this host takes connections from all other hosts. Yields the port's number.

    It takes them by IPv4, and if the host has both kinds, by IPv6, too.
    """
    dual_stack = socket.has_dualstack_ipv6()
    if dual_stack:
        family = socket.AF_INET6
    else:
        family = socket.AF_INET
    listener = socket.create_server(
        ("", 0),  # any address of this host, and any free port
        family=family,
        dualstack_ipv6=dual_stack,
        backlog=WAITING_CONNECTIONS,
    )
    with listener:
        port: int = listener.getsockname()[1]
        yield port


def compare_clocks(membership: Membership) -> dict[int, float]:
    """How many seconds each rank's clock is ahead of the first rank's: {rank: seconds}.

    The ranks read their clocks at about the same moment, just after an exchange through the store has ended.
    """
    membership.gather("before the clocks are read", answer=None)
    readings = []  # each is {rank: what its clock shows, in seconds since 1970}
    for number in range(CLOCK_READINGS):
        readings.append(membership.gather(f"reading the clocks, {number}", answer=time.time()))
    first_rank = min(membership.members)
    offsets = {}
    for rank in membership.members:
        differences = [reading[rank] - reading[first_rank] for reading in readings]
        # A rank that reads its clock a little late seems to be ahead, so the smallest difference is the most exact one.
        offsets[rank] = min(differences, key=abs)
    return offsets


def try_connections(membership: Membership, facts: Mapping[int, Facts]) -> dict[int, dict[int, str]]:
    """Let each rank connect to every other by TCP. Returns {rank: {a rank to which it cannot connect: the reason}}."""
    addresses = {}
    for rank, rank_facts in facts.items():
        if rank != membership.rank and rank_facts.address:
            addresses[rank] = (rank_facts.address, rank_facts.port)
    refusals_of_rank = membership.attempt("connecting by TCP", partial(refusals, addresses))
    for rank, reasons in refusals_of_rank.items():
        if reasons is None:  # Trying to connect raised an error, which the membership keeps.
            refusals_of_rank[rank] = {}
    return refusals_of_rank


def refusals(addresses: Mapping[int, tuple[str, int]]) -> dict[int, str]:
    """Try to connect to all of {rank: (address, port)}. Returns {rank: the reason} for those that accept no connection.

    Many connections are tried at once, because each may wait until its timeout.
    """
    with ThreadPoolExecutor(max_workers=CONNECTIONS_AT_ONCE) as threads:
        reasons = threads.map(reason_for_no_connection, addresses.values())
        reason_of_rank = dict(zip(addresses, reasons, strict=True))
    return {rank: reason for rank, reason in reason_of_rank.items() if reason}


def reason_for_no_connection(address: tuple[str, int]) -> str:
    """Open and close a TCP connection to (address, port). Returns why that fails, or "" if it works."""
    try:
        socket.create_connection(address, timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return str(error.strerror or error)
    return ""


# --- trials -----------------------------------------------------------------------------------------------------------


def try_collectives(membership: Membership) -> dict[str, dict[int, Trial | None]]:
    """Try each collective among all members. Returns {collective: {rank: its trial, or None where it raised an error}}.

    A collective that fails may break the process group. If no new group can be started, the remaining collectives are
    left out.
    """
    by_name: dict[str, dict[int, Trial | None]] = {}
    for name in trials.COLLECTIVES:
        if not membership.backend:
            break
        by_name[name] = membership.attempt(name, partial(trials.try_collective, name, membership.device))
    return by_name


def try_links(membership: Membership) -> dict[tuple[int, int], Trial]:
    """Try the link of each pair of ranks. Returns {(lower rank, higher rank): trial}, without the pairs that failed.

    In each round, pairs that have no rank in common are tried at the same time. A rank that stops answering in a round
    is no longer a member, so its other pairs are left out. If no process group can be started for the ranks that are
    left, the trials end.
    """
    links: dict[tuple[int, int], Trial] = {}
    ranks_at_start = list(membership.members)  # try_pairs removes ranks that are lost from membership.members.
    rounds = trials.rounds_of_pairs(len(ranks_at_start))
    for number, pairs_of_indices in enumerate(rounds, start=1):
        has_no_group = membership.backend == ""
        if has_no_group:
            break
        pairs = []
        for first_index, second_index in pairs_of_indices:
            first = ranks_at_start[first_index]
            second = ranks_at_start[second_index]
            if first in membership.members and second in membership.members:
                pairs.append((first, second))
        links |= try_pairs(membership, f"round {number} of the links", pairs)
    return links


def try_pairs(membership: Membership, step: str, pairs: list[tuple[int, int]]) -> dict[tuple[int, int], Trial]:
    """Let pairs of ranks exchange data, all pairs at the same time, and return {pair: the trial of its link}.

    No rank is in two pairs. A pair is left out if one of its ranks fails. What that rank raised is added to
    ``membership.errors`` under the name ``step``.
    """
    peer_of = {}  # {rank: the other rank of its pair}
    for first, second in pairs:
        peer_of[first] = second
        peer_of[second] = first

    def exchange_with_peer() -> Trial | None:
        if membership.rank not in peer_of:
            return None  # One member of an odd number has no peer.
        peer_in_group = membership.members.index(peer_of[membership.rank])
        return trials.try_link(peer_in_group, membership.device)

    trial_of_rank = membership.attempt(step, exchange_with_peer)
    for rank, error in membership.errors.get(step, {}).items():
        membership.errors[step][rank] = f"with rank {peer_of[rank]}: {error}"
    links = {}
    for first, second in pairs:
        trial_of_first = trial_of_rank.get(first)
        trial_of_second = trial_of_rank.get(second)
        if trial_of_first is not None and trial_of_second is not None:
            links[first, second] = worse_of(trial_of_first, trial_of_second)
    return links


def worse_of(first: Trial, second: Trial) -> Trial:
    """The trial of a link from the trials of its two ranks: of each measurement, the worse one."""
    return Trial(
        right=first.right and second.right,
        seconds=max(first.seconds, second.seconds),
        speed=min(first.speed, second.speed),
    )


def try_plan(membership: Membership, plan: Plan, hosts: list[str]) -> dict[int, Speeds | None]:
    """Measure on each rank the speeds that the plan counts on. Returns {rank: its speeds}.

    ``hosts`` has the name of each member's host, in order. Without a process group nothing is measured.
    """
    if not membership.backend:
        return {}
    measure_speeds = partial(trials.try_plan, plan.dtype, hosts, membership.device)
    return membership.attempt("what the plan counts on", measure_speeds)


# --- without a launcher -----------------------------------------------------------------------------------------------


def start_local(nproc: int | None, flags: list[str]) -> int:
    """Start the doctor with these flags on ``nproc`` ranks of this machine, as torchrun would.

    If ``nproc`` is None, there are as many ranks as GPUs, or two on a machine without GPUs. Returns the exit status: 0,
    or 1 if a rank failed.
    """
    if nproc is None:
        nproc = torch.cuda.device_count()
    if nproc == 0:  # This machine has no GPU.
        nproc = 2
    set_defaults(nproc)
    # This process serves the store, as torchrun's agent does.
    any_free_port = 0
    store = dist.TCPStore("127.0.0.1", any_free_port, world_size=None, is_master=True, wait_for_workers=False)
    variables = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = [sys.executable, "-m", "helpers", "doctor", *flags]
    ranks = []
    for rank in range(nproc):
        variables_of_rank = {**variables, **rank_variables(rank, nproc)}
        ranks.append(processes.start(command, env=variables_of_rank))
    statuses = processes.wait(ranks)
    if any(statuses.values()):
        return 1  # The rank that failed has printed why.
    print("\nThat was this machine alone. On a cluster, start it in every rank:")
    print("  torchrun ... -m helpers doctor    or    srun python -m helpers doctor")
    return 0
