"""What is wrong with a cluster according to the findings, and the next thing to try for each problem.

There is a function for each kind of problem, which yields a Problem for each case that it sees in the findings.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from helpers.doctor.findings import Findings, slowest

CLOCK_TOLERANCE = 1.0  # seconds by which the hosts' clocks may differ
SLOW_RANK = 2  # A rank is called slow if it computes so many times slower than the median.
SLOW_LINK = 4  # A link is called slow if it has so many times less bandwidth than the median.
LITTLE_SHARED_MEMORY = 1e9  # bytes

LOOK_AT_GPU = "Look there: nvidia-smi; CUDA_VISIBLE_DEVICES; python -c 'import torch; print(torch.cuda.is_available())'"
LOOK_AT_BACKEND = {
    "nccl": "Try --backend gloo: if that works, the fault is NCCL's. NCCL_DEBUG=INFO prints its log.",
    "gloo": "Name the hosts' common interface in GLOO_SOCKET_IFNAME; TORCH_DISTRIBUTED_DEBUG=DETAIL says more.",
}


@dataclass(frozen=True)
class Problem:
    """What is wrong or slow, and what to try next, in a sentence each."""

    text: str
    remedy: str


def problems(findings: Findings) -> list[Problem]:
    """What is wrong, in the order in which to look at it, because the first problems may be the cause of later ones."""
    found = [
        *missing_ranks(findings),
        *different_versions(findings),
        *broken_gpus(findings),
        *missing_addresses(findings),
        *closed_connections(findings),
        *wrong_clocks(findings),
        *errors(findings),
        *wrong_results(findings),
    ]
    if findings.backend == "nccl":
        found += [*scarce_memory(findings), *slow_links(findings)]
    return found


def notes(findings: Findings) -> list[Problem]:
    """What is not wrong but may explain why training is slow.

    Scarce memory and slow links are notes on gloo only; on NCCL they are problems.
    """
    if findings.backend == "nccl":
        return [*gpus_with_warnings(findings), *slow_ranks(findings)]
    # On gloo the speed of a link depends on how busy the cores are, so a slow link need not be a fault.
    return [*gpus_with_warnings(findings), *scarce_memory(findings), *slow_links(findings), *slow_ranks(findings)]


# --- text -------------------------------------------------------------------------------------------------------------


def span(numbers: Iterable[int]) -> str:
    """Sorted numbers as text: ``0-3, 6`` for [0, 1, 2, 3, 6]."""
    runs: list[list[int]] = []  # lists of numbers that follow each other without a gap: [[0, 1, 2, 3], [6]]
    for number in numbers:
        continues_last_run = bool(runs) and runs[-1][-1] == number - 1
        if continues_last_run:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = []
    for run in runs:
        if len(run) == 1:
            texts.append(f"{run[0]}")
        else:
            texts.append(f"{run[0]}-{run[-1]}")
    return ", ".join(texts)


def ranks(numbers: Iterable[int]) -> str:
    """``rank 2`` or ``ranks 0-3, 6``."""
    numbers = sorted(numbers)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {span(numbers)}"


def three_digits(number: float) -> str:
    """A number with three digits, or with all digits before the point: ``0.0123``, ``1.23``, ``1234``."""
    if number < 100:
        return f"{number:.3g}"
    return f"{number:.0f}"


def at_start(text: str) -> str:
    """A text with its first letter in upper case, to begin a sentence."""
    return text[:1].upper() + text[1:]


# --- problems ---------------------------------------------------------------------------------------------------------


def missing_ranks(findings: Findings) -> Iterator[Problem]:
    """Ranks that never answered, and ranks that stopped answering at a later step.

    The first step is the roll call, in which each rank says that it is there.
    """
    never_came = [rank for rank, step in findings.lost.items() if step == "roll call"]
    if never_came:
        yield Problem(
            f"{at_start(ranks(never_came))} of {findings.world_size} did not come within {findings.timeout:g} s.",
            "Did every node start it? Look at the missing rank's own output; where it starts slowly, --timeout 300.",
        )
    for rank, step in findings.lost.items():
        if rank not in never_came:
            yield Problem(
                f"Rank {rank} on {findings.host(rank)} stopped answering in the step: {step}.",
                "It died or it hangs: look at its own output, and for the out-of-memory killer in its host's dmesg.",
            )


def different_versions(findings: Findings) -> Iterator[Problem]:
    """Programs of which the ranks have different versions, because these may not understand each other."""
    for program in ("python", "torch", "NCCL"):
        ranks_by_version = defaultdict(list)
        for rank, facts in findings.facts.items():
            ranks_by_version[facts.versions[program] or "none"].append(rank)
        if len(ranks_by_version) > 1:
            versions = [f"{version} on {ranks(group)}" for version, group in ranks_by_version.items()]
            yield Problem(
                f"The ranks differ in {program}: {'; '.join(versions)}.",
                "Activate one and the same environment on every node.",
            )


def broken_gpus(findings: Findings) -> Iterator[Problem]:
    """GPUs that fail, that this PyTorch cannot use, that several ranks share, or that some ranks lack."""
    for rank, facts in findings.facts.items():
        if facts.gpu_error:
            yield Problem(
                f"The GPU of rank {rank} on {facts.host} does not answer: {facts.gpu_error}.",
                LOOK_AT_GPU,
            )
        if facts.unsupported_gpu:
            yield Problem(
                f"The PyTorch of rank {rank} on {facts.host} has no code for its GPU, {facts.unsupported_gpu}.",
                "Install a PyTorch that is built for this GPU: https://pytorch.org/get-started/locally",
            )
        if facts.health and facts.health.uncorrected_errors:
            yield Problem(
                f"The memory of the GPU of rank {rank} on {facts.host} has uncorrected errors: "
                f"{facts.health.uncorrected_errors} since its last reset.",
                f"Leave {facts.host} out, and ask for a reset of the GPU; if they come back, for another GPU.",
            )
    yield from unevenly_divided_gpus(findings)


def gpus_with_warnings(findings: Findings) -> Iterator[Problem]:
    """GPUs whose clocks are slowed down, and GPUs that had a bad Xid since their host booted.

    These are notes, not problems: for example, the Xid may be older than the GPU's last reset.
    """
    for rank, facts in findings.facts.items():
        if facts.health is None:
            continue
        if facts.health.slowdowns:
            yield Problem(
                f"The clocks of the GPU of rank {rank} on {facts.host} are slowed down: "
                f"{', '.join(facts.health.slowdowns)}.",
                "Look there: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; all ranks wait for this one.",
            )
        if facts.health.xids:
            numbers = ", ".join(map(str, facts.health.xids))
            yield Problem(
                f"The GPU of rank {rank} on {facts.host} had Xid {numbers} since the host booted.",
                f"Unless it was reset since then, leave {facts.host} out and tell an administrator.",
            )


def unevenly_divided_gpus(findings: Findings) -> Iterator[Problem]:
    """GPUs that several ranks share, and ranks without a GPU beside others that have one."""
    ranks_by_gpu = defaultdict(list)
    without_gpu = []
    for rank, facts in findings.facts.items():
        if facts.gpu_id:
            ranks_by_gpu[facts.gpu_id].append(rank)
        else:
            without_gpu.append(rank)
    for sharing_ranks in ranks_by_gpu.values():
        if len(sharing_ranks) > 1:
            yield Problem(
                f"{at_start(ranks(sharing_ranks))} share one GPU, so everything was tried on gloo.",
                "Start one rank for each GPU: torchrun --nproc-per-node=gpu",
            )
    if without_gpu and ranks_by_gpu:
        host = findings.host(without_gpu[0])
        yield Problem(f"{at_start(ranks(without_gpu))} on {host} found no GPU, and others have one.", LOOK_AT_GPU)


def missing_addresses(findings: Findings) -> Iterator[Problem]:
    """Ranks whose network interface has no address, or one that other hosts cannot reach."""
    ranks_without_address = defaultdict(list)  # {interface: the ranks that should use it}
    for rank, facts in findings.facts.items():
        if not facts.address:
            ranks_without_address[facts.interface].append(rank)
    for interface, affected in ranks_without_address.items():
        yield Problem(
            f"{at_start(ranks(affected))} should use the network interface {interface}, which has no address.",
            "Put an interface that `ip -brief address` lists into GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME.",
        )
    isolated = ranks_on_loopback(findings)
    if isolated:
        address = findings.facts[isolated[0]].address
        yield Problem(
            f"{at_start(ranks(isolated))} would listen on {address}, which no other host can reach.",
            "Name the interface between the hosts: export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0",
        )


def ranks_on_loopback(findings: Findings) -> list[int]:
    """The ranks that only their own host can reach. [] if there is no other host."""
    if len(findings.hosts) == 1:
        return []
    result = []
    for rank, facts in findings.facts.items():
        address = facts.address or ""
        if address.startswith(("127.", "::1")):
            result.append(rank)
    return result


def closed_connections(findings: Findings) -> Iterator[Problem]:
    """Ranks that cannot connect to others: one problem for all that fail to reach the same host for the same reason.

    Ranks on the loopback interface are left out, because ``missing_addresses`` says why nobody can connect to them.
    """
    on_loopback = ranks_on_loopback(findings)
    sources_of = defaultdict(set)  # {(host, reason): ranks that cannot connect to the host for this reason}
    targets_of = defaultdict(set)  # {(host, reason): ranks on the host to which they cannot connect}
    for source, reasons in findings.unreachable.items():
        for target, reason in reasons.items():
            if target not in on_loopback:
                host = findings.host(target)
                sources_of[host, reason].add(source)
                targets_of[host, reason].add(target)
    for host, reason in targets_of:
        sources = sources_of[host, reason]
        targets = targets_of[host, reason]
        interface = findings.facts[min(targets)].interface
        yield Problem(
            f"{at_start(ranks(sources))} cannot connect to {ranks(targets)} on {host} ({interface}): {reason}.",
            "Open all TCP ports between the nodes, or choose another interface in GLOO_SOCKET_IFNAME.",
        )


def wrong_clocks(findings: Findings) -> Iterator[Problem]:
    """Ranks whose host's clock is too far from the first rank's."""
    for rank, offset in findings.clock_offsets.items():
        if abs(offset) <= CLOCK_TOLERANCE:
            continue
        if offset > 0:
            difference = f"{offset:.1f} s ahead of"
        else:
            difference = f"{-offset:.1f} s behind"
        yield Problem(
            f"The clock of rank {rank} on {findings.host(rank)} is {difference} the first rank's.",
            "Start chrony or another NTP client there: rendezvous and logs compare the hosts' clocks.",
        )


def errors(findings: Findings) -> Iterator[Problem]:
    """Steps of the examination that raised an error, such as a collective: one problem for each step."""
    for step, error_by_rank in findings.errors.items():
        if step in findings.lost.values():
            continue  # A rank was lost in this step, which is a problem already and the cause of the error.
        ranks_by_error = defaultdict(list)
        for rank, error in error_by_rank.items():
            ranks_by_error[error].append(rank)
        failures = [f"on {ranks(group)}: {error}" for error, group in ranks_by_error.items()]
        yield Problem(f"{step} failed {'; '.join(failures)}.", LOOK_AT_BACKEND[findings.backend])


def wrong_results(findings: Findings) -> Iterator[Problem]:
    """Collectives and links that delivered wrong data, although no error was raised."""
    for collective, trials in findings.collectives.items():
        # A rank where the collective raised an error has None as its trial.
        wrong_ranks = [rank for rank, trial in trials.items() if trial is not None and not trial.right]
        if wrong_ranks:
            yield Problem(
                f"{collective} gave a wrong result on {ranks(wrong_ranks)}.",
                "Take these hosts out one by one and repeat; then look at their GPUs, links and versions.",
            )
    for (first, second), link in findings.links.items():
        if not link.right:
            hosts = f"{findings.host(first)}, {findings.host(second)}"
            yield Problem(
                f"Data between ranks {first} and {second} arrives changed ({hosts}).",
                "Take one of the two hosts out and repeat; then look at its GPU and its link.",
            )


# --- notes, or problems on NCCL ---------------------------------------------------------------------------------------


def scarce_memory(findings: Findings) -> Iterator[Problem]:
    """Hosts with little shared memory, as containers have by default."""
    shared_memory = {facts.host: facts.shared_memory for facts in findings.facts.values()}
    for host, free in shared_memory.items():
        if free is not None and free < LITTLE_SHARED_MEMORY:
            yield Problem(
                f"{host} has only {free / 1e6:.0f} MB of shared memory; data loaders and NCCL use it.",
                "In a container: docker run --shm-size=8g, or --ipc=host",
            )


def slow_ranks(findings: Findings) -> Iterator[Problem]:
    """The rank that computes most slowly, if it is far slower than the median."""
    slow = slowest(findings.compute_speeds)
    if slow is not None and slow.speed * SLOW_RANK < slow.median_speed:
        yield Problem(
            f"Rank {slow.key} on {findings.host(slow.key)} computes far more slowly than the others.",
            "Look for another process, for heat (nvidia-smi -q -d PERFORMANCE), or for too few cores or threads.",
        )


def slow_links(findings: Findings) -> Iterator[Problem]:
    """The slowest link within a host and the slowest between hosts, each compared with links of the same kind."""
    speeds_within_hosts = {}  # {(lower rank, higher rank): bytes per second}
    speeds_between_hosts = {}
    for (first, second), link in findings.links.items():
        if findings.host(first) == findings.host(second):
            speeds_within_hosts[first, second] = link.speed
        else:
            speeds_between_hosts[first, second] = link.speed
    for speeds in (speeds_within_hosts, speeds_between_hosts):
        slow_link = slowest(speeds)
        if slow_link is not None and slow_link.speed * SLOW_LINK < slow_link.median_speed:
            first, second = slow_link.key
            yield Problem(
                f"The link of ranks {first} and {second} has far less bandwidth than the others.",
                "Look at the hosts' links. With NCCL_DEBUG=INFO, NET/Socket says that NCCL has fallen back to TCP.",
            )
