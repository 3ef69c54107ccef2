"""The doctor in each rank: try what a training run will need, and say what is wrong."""

import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist

from helpers.doctor import trials
from helpers.doctor.facts import Facts, facts_of_rank
from helpers.doctor.findings import Findings
from helpers.doctor.membership import REPORT_SECONDS, Membership, MembershipError, Place, open_store, plain
from helpers.doctor.plan import Plan
from helpers.doctor.report import report
from helpers.doctor.trials import Speeds, Trial
from helpers.ranks import processes
from helpers.ranks.rank import rank_variables
from helpers.ranks.torchrun import set_defaults


def unreachable(addresses: dict[int, tuple[str, int]]) -> list[tuple[int, str]]:
    """[(rank, the reason)] for each rank of {rank: (address, port)} that accepts no connection."""

    def refusal(address: tuple[str, int]) -> str:
        try:
            socket.create_connection(address, timeout=5).close()
        except OSError as error:
            return str(error.strerror or error)
        return ""

    with ThreadPoolExecutor(32) as pool:
        reasons = zip(addresses, pool.map(refusal, addresses.values()), strict=True)
        return [(rank, reason) for rank, reason in reasons if reason]


def mutually_reachable(facts: dict[int, Facts], unreached: dict[int, dict[int, str]]) -> list[int]:
    """The ranks that all reach each other, taken in order: a group with an unreachable rank would hang at its start."""
    group: list[int] = []
    for rank in unreached:
        if facts[rank].address and not any(rank in unreached[peer] or peer in unreached[rank] for peer in group):
            group.append(rank)
    return group or list(unreached)


def compare_clocks(membership: Membership) -> dict[int, float]:
    """{rank: seconds that its clock is ahead of the first rank's}: some read it late, so the least of several."""
    readings = [membership.gather(f"reading the clocks, {k}", time.time()) for k in range(6)][1:]
    first = min(membership.members)
    return {rank: min((reading[rank] - reading[first] for reading in readings), key=abs) for rank in readings[-1]}


def try_links(membership: Membership) -> dict[tuple[int, int], Trial]:
    """What the slower of the two has of the link, and whether both got the right data, for each pair that has one."""
    links, members = {}, membership.members
    for number, indices in enumerate(trials.rounds_of_pairs(len(members)), 1):
        pairs = [(members[a], members[b]) for a, b in indices if {members[a], members[b]} <= set(membership.members)]
        peers = {}
        for first, second in pairs:
            peers[first] = second
            peers[second] = first
        if not membership.backend:
            break
        step, peer = f"round {number} of the links", peers.get(membership.rank)
        link = None if peer is None else partial(trials.try_link, membership.members.index(peer), membership.device)
        answers = membership.attempt(step, link or (lambda: None))  # of an odd number of members, one has no peer
        for rank, text in membership.errors.get(step, {}).items():
            membership.errors[step][rank] = f"with rank {peers[rank]}: {text}"
        for pair in pairs:
            if all(answers.get(rank) for rank in pair):
                a, b = (Trial(**answers[rank]) for rank in pair)
                links[pair] = Trial(a.right and b.right, max(a.seconds, b.seconds), min(a.speed, b.speed))
    return links


def try_collectives(membership: Membership) -> dict[str, dict[int, Trial | None]]:
    """{name: {rank: its trial, or None where the collective raised}}."""
    by_name = {}
    for name in trials.collectives(1, torch.device("cpu")) if membership.backend else []:
        if membership.backend:
            answers = membership.attempt(name, partial(trials.try_collective, name, membership.device))
            by_name[name] = {rank: answer and Trial(**answer) for rank, answer in answers.items()}
    return by_name


def examine(membership: Membership, place: Place, backend: str | None, plan: Plan | None = None) -> Findings:
    """Try everything with the other ranks, and with a plan also what it counts on. Every rank has the same findings."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=4096) as listener:
        own = facts_of_rank(place, listener.getsockname()[1], backend)
        answers = membership.gather("roll call", own, membership.timeout)
        facts = {rank: Facts(**answer) for rank, answer in answers.items()}
        clocks = compare_clocks(membership)
        addresses = {rank: (peer.address, peer.port) for rank, peer in facts.items() if peer.address}
        addresses.pop(membership.rank, None)
        refusals = membership.attempt("connecting by TCP", partial(unreachable, addresses))
    unreached = {rank: dict(pairs or ()) for rank, pairs in refusals.items()}
    membership.members = mutually_reachable(facts, unreached)
    if membership.rank not in membership.members:
        raise MembershipError("This rank cannot connect to some others, which go on without it. See their report.")
    gpu_ids = {peer.gpu_id for peer in facts.values()}
    if all(gpu_ids) and len(gpu_ids) == len(facts):
        membership.backend, membership.device = "nccl", torch.device(own.device)
        torch.cuda.set_device(membership.device)
    first_backend = membership.backend
    membership.start_group()
    collectives, links = try_collectives(membership), try_links(membership)
    alone = membership.attempt("computing alone", partial(trials.try_matmul, "float32", membership.device))
    speeds = {}
    if plan and membership.backend:
        hosts = [facts[rank].host for rank in membership.members]
        work = partial(trials.try_plan, plan.dtype, hosts, membership.device)
        speeds = membership.attempt("what the plan counts on", work)
    return Findings(
        world_size=place.world_size,
        timeout=membership.timeout,
        master=f"{place.host}:{place.port}",
        backend=first_backend,
        device=membership.device.type,
        facts=facts,
        members=membership.members,
        lost=membership.lost,
        errors=membership.errors,
        unreached=unreached,
        clocks=clocks,
        collectives=collectives,
        links=links,
        alone=alone,
        speeds={rank: answer and Speeds(**answer) for rank, answer in speeds.items()},
    )


def run_rank(place: Place, backend: str | None = None, timeout: float = 60, plan: Plan | None = None) -> int:
    """Examine the ranks, as one of them; the first prints the report. Returns the status: 0, or 1 for a problem."""
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # with it a timeout raises and does not end the process
    try:
        store, serves = open_store(place, timeout)
        membership = Membership(store, place.rank, place.world_size, timeout)
        try:
            findings = examine(membership, place, backend, plan)
            text, status = report(findings, plan)
            if place.rank == findings.members[0]:
                print(text, flush=True)
            membership.gather("goodbye", None)
        finally:
            store.set(f"gone/{place.rank}", "")
            gone = [f"gone/{member}" for member in membership.members]
            if serves:  # the store has to live until the last rank has left
                membership.wait_for(["goodbye/all"], 5 * timeout)
                membership.wait_for(gone, REPORT_SECONDS)
    except (MembershipError, dist.DistError) as error:
        reason = str(error)
        if isinstance(error, dist.DistError):
            reason = f"The store at {place.host} went away ({plain(error)}). Look at the rank that served it."
        print(f"rank {place.rank} on {socket.gethostname()}: {reason}", file=sys.stderr, flush=True)
        return 1
    if status and "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun prints a long report for each rank that fails or is stopped: one rank of each host is enough.
        if place.local_rank > 0:
            return 0
        membership.wait_for(gone, REPORT_SECONDS)  # the store may end with the first host
        time.sleep(0.5)
    return status


def start_local(nproc: int | None, flags: list[str]) -> int:
    """Start the doctor on ``nproc`` ranks of this machine, as torchrun would; return 0, or 1 where one failed."""
    nproc = nproc or torch.cuda.device_count() or 2
    set_defaults(nproc)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    variables = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = [sys.executable, "-m", "helpers", "doctor", *flags]
    ranks = [processes.start(command, env={**variables, **rank_variables(rank, nproc)}) for rank in range(nproc)]
    statuses = processes.wait(ranks)
    print("\nThat was this machine alone. On a cluster, start it in every rank:")
    print("  torchrun ... -m helpers doctor    or    srun python -m helpers doctor")
    return int(any(statuses.values()))
