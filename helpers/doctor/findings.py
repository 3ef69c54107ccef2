"""What the doctor found, and what it means: the problems, each with the next thing to try. It only computes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from helpers.doctor.facts import Facts
from helpers.doctor.trials import Speeds, Trial

SLOW_CLOCK = 1.0  # seconds that clocks may differ: c10d's rendezvous and every log compare them
SLOW_RANK, SLOW_LINK = 2, 4  # times the median

TRY = {  # the next thing to try, for each kind of problem and note
    "late": "Did every node start it? Look at the missing rank's own output; where it starts slowly, --timeout 300.",
    "lost": "It died or it hangs: look at its own output, and for the out-of-memory killer in its host's dmesg.",
    "versions": "Activate one and the same environment on every node.",
    "local ranks": "Set LOCAL_RANK to 0, 1, ... on each host, or let torchrun do it; give hosts different names.",
    "shared GPU": "Start one rank for each GPU: torchrun --nproc-per-node=gpu",
    "GPU": "Look there: nvidia-smi; CUDA_VISIBLE_DEVICES; python -c 'import torch; print(torch.cuda.is_available())'",
    "build": "Install a PyTorch that is built for this GPU: https://pytorch.org/get-started/locally",
    "no address": "Put an interface that `ip -brief address` lists into GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME.",
    "loopback": "Name the interface between the hosts: export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0",
    "closed": "Open all TCP ports between the nodes, or choose another interface in GLOO_SOCKET_IFNAME.",
    "clock": "Start chrony or another NTP client there: rendezvous and logs compare the hosts' clocks.",
    "nccl": "Try --backend gloo: if that works, the fault is NCCL's. NCCL_DEBUG=INFO prints its log.",
    "gloo": "Name the hosts' common interface in GLOO_SOCKET_IFNAME; TORCH_DISTRIBUTED_DEBUG=DETAIL says more.",
    "wrong result": "Take these hosts out one by one and repeat; then look at their GPUs, links and versions.",
    "wrong link": "Take one of the two hosts out and repeat; then look at its GPU and its link.",
    "memory": "In a container: docker run --shm-size=8g, or --ipc=host",
    "slow rank": "Look for another process, for heat (nvidia-smi -q -d PERFORMANCE), or for too few cores or threads.",
    "slow link": "Look at the hosts' links. With NCCL_DEBUG=INFO, NET/Socket says that NCCL has fallen back to TCP.",
}

Problem = tuple[str, str]  # (what is wrong, the next thing to try)
Key = TypeVar("Key")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Findings:
    """What ``examine`` found, the same on every rank. Dicts by rank leave out ranks that did not answer."""

    world_size: int
    timeout: float  # seconds
    master: str  # HOST:PORT of the store
    backend: str  # on which everything was to be tried
    device: str  # cpu or cuda
    facts: dict[int, Facts]  # of all ranks that came
    members: list[int]  # the ranks that are here at the end
    lost: dict[int, str] = field(default_factory=dict)  # {rank: the step at which it stopped answering}
    errors: dict[str, dict[int, str]] = field(default_factory=dict)  # {step: {rank: what went wrong}}
    unreached: dict[int, dict[int, str]] = field(default_factory=dict)  # {rank: {a rank it cannot reach: why}}
    clocks: dict[int, float] = field(default_factory=dict)  # {rank: seconds ahead of the first rank's}
    collectives: dict[str, dict[int, Trial | None]] = field(default_factory=dict)
    links: dict[tuple[int, int], Trial] = field(default_factory=dict)  # {(lower rank, higher rank): ...}
    alone: dict[int, float | None] = field(default_factory=dict)  # {rank: FLOP/s of its own matrix product}
    speeds: dict[int, Speeds | None] = field(default_factory=dict)  # for a plan

    def host(self, rank: int) -> str:
        """The name of the rank's host."""
        return self.facts[rank].host

    @property
    def hosts(self) -> list[str]:
        """The name of each host, once, in the order of ranks."""
        return list(dict.fromkeys(facts.host for facts in self.facts.values()))


def slowest(speeds: Mapping[Key, float | None]) -> list[tuple[Key, float, float]]:
    """[(the key of the least speed, this speed, the median)]; [] for fewer than two speeds."""
    ranked = sorted((speed, key) for key, speed in speeds.items() if speed)
    return [(ranked[0][1], ranked[0][0], median(speed for speed, _ in ranked))] if len(ranked) > 1 else []


def span(numbers: Iterable[int]) -> str:
    """Sorted numbers as text: ``0-3, 6`` for [0, 1, 2, 3, 6]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def ranks(numbers: Iterable[int]) -> str:
    """``rank 2`` or ``ranks 0-3, 6``."""
    numbers = sorted(numbers)
    return f"rank{'s' if len(numbers) > 1 else ''} {span(numbers)}"


def by_answer(answers: Mapping[Key, Answer]) -> dict[Answer, list[Key]]:
    """{answer: the ranks that gave it} from {rank: answer}."""
    groups: dict[Answer, list[Key]] = {}
    for key, answer in answers.items():
        groups.setdefault(answer, []).append(key)
    return groups


def problems(findings: Findings) -> list[Problem]:
    """What is wrong, in the order in which to look at it."""
    checks = [missing, differences, devices, network, clocks, messages]
    checks += [scarce_memory, slow_links] * (findings.backend == "nccl")
    return [problem for check in checks for problem in check(findings)]


def notes(findings: Findings) -> list[Problem]:
    """What is not wrong but may explain slowness: on gloo, whose times depend on busy cores, slow links as well."""
    checks = [scarce_memory, slow_links] * (findings.backend != "nccl") + [slow_ranks]
    return [note for check in checks for note in check(findings)]


def missing(findings: Findings) -> Iterator[Problem]:
    if late := [rank for rank, step in findings.lost.items() if step == "roll call"]:
        yield f"{ranks(late)} of {findings.world_size} did not come within {findings.timeout:g} s.", TRY["late"]
    for rank, step in findings.lost.items():
        if rank not in late:
            yield f"Rank {rank} on {findings.host(rank)} stopped answering in the step: {step}.", TRY["lost"]


def differences(findings: Findings) -> Iterator[Problem]:
    for name in ("python", "torch", "NCCL"):
        versions = by_answer({rank: getattr(facts, name) for rank, facts in findings.facts.items()})
        if len(versions) > 1:
            each = "; ".join(f"{version or 'none'} on {ranks(having)}" for version, having in versions.items())
            yield f"The ranks differ in {name}: {each}.", TRY["versions"]


def devices(findings: Findings) -> Iterator[Problem]:
    for host in findings.hosts:
        local_ranks = sorted(facts.local_rank for facts in findings.facts.values() if facts.host == host)
        if len(set(local_ranks)) < len(local_ranks):
            yield f"Ranks on {host} have equal local ranks ({', '.join(map(str, local_ranks))}).", TRY["local ranks"]
    for rank, facts in findings.facts.items():
        if facts.fault:
            yield f"The GPU of rank {rank} on {facts.host} does not answer: {facts.fault}.", TRY["GPU"]
        if facts.no_code:
            yield f"The PyTorch of rank {rank} on {facts.host} has no code for its GPU, {facts.no_code}.", TRY["build"]
    gpus = by_answer({rank: facts.gpu_id for rank, facts in findings.facts.items()})
    without = gpus.pop("", [])
    for sharing in gpus.values():
        if len(sharing) > 1:
            yield f"{ranks(sharing)} share one GPU, so everything was tried on gloo.", TRY["shared GPU"]
    if without and gpus:
        yield f"{ranks(without)} on {findings.host(without[0])} found no GPU, and others have one.", TRY["GPU"]


def network(findings: Findings) -> Iterator[Problem]:
    facts = findings.facts
    nowhere = {rank: facts.interface for rank, facts in facts.items() if not facts.address}
    for name, without in by_answer(nowhere).items():
        yield f"{ranks(without)} should use the network interface {name}, which has no address.", TRY["no address"]
    loopback = [rank for rank, facts in facts.items() if (facts.address or "").startswith(("127.", "::1"))]
    isolated = loopback if len(findings.hosts) > 1 else []
    if isolated:
        address = facts[isolated[0]].address
        yield f"{ranks(isolated)} would listen on {address}, which no other host can reach.", TRY["loopback"]
    origins: dict[tuple[int, str], list[int]] = {}  # {(a rank, why it is not reached): the ranks that do not reach it}
    for rank, reasons in findings.unreached.items():
        for peer, reason in reasons.items():
            origins.setdefault((peer, reason), []).append(rank)
    refusals = {
        (peer, reason): (tuple(peers), f"on {findings.host(peer)} ({facts[peer].interface}): {reason}.")
        for (peer, reason), peers in origins.items()
        if peer not in isolated
    }
    for (peers, where), targets in by_answer(refusals).items():
        yield f"{ranks(peers)} cannot connect to {ranks(peer for peer, _ in targets)} {where}", TRY["closed"]


def clocks(findings: Findings) -> Iterator[Problem]:
    for rank, ahead in findings.clocks.items():
        if abs(ahead) > SLOW_CLOCK:
            difference = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'}"
            yield f"The clock of rank {rank} on {findings.host(rank)} is {difference} the first rank's.", TRY["clock"]


def messages(findings: Findings) -> Iterator[Problem]:
    for step, errors in findings.errors.items():
        if step not in findings.lost.values():  # else the error follows from the loss of a rank, which ``missing`` has
            each = "; ".join(f"on {ranks(raising)}: {text}" for text, raising in by_answer(errors).items())
            yield f"{step} failed {each}.", TRY[findings.backend]
    for name, trials in findings.collectives.items():
        if wrong := [rank for rank, trial in trials.items() if trial and not trial.right]:
            yield f"{name} gave a wrong result on {ranks(wrong)}.", TRY["wrong result"]
    for (a, b), link in findings.links.items():
        if not link.right:
            hosts = f"{findings.host(a)}, {findings.host(b)}"
            yield f"Data between ranks {a} and {b} arrives changed ({hosts}).", TRY["wrong link"]


def scarce_memory(findings: Findings) -> Iterator[Problem]:
    free = {facts.host: facts.memory for facts in findings.facts.values()}
    for host, memory in free.items():
        if memory is not None and memory < 1e9:
            what = f"{host} has only {memory / 1e6:.0f} MB of shared memory; data loaders and NCCL use it."
            yield what, TRY["memory"]


def slow_ranks(findings: Findings) -> Iterator[Problem]:
    for rank, speed, middle in slowest(findings.alone):
        if speed * SLOW_RANK < middle:
            yield f"Rank {rank} on {findings.host(rank)} computes far more slowly than the others.", TRY["slow rank"]


def slow_links(findings: Findings) -> Iterator[Problem]:
    """The slowest link within a host and the slowest between hosts, each compared with its own kind."""
    kinds = by_answer({(a, b): findings.host(a) == findings.host(b) for a, b in findings.links})
    for pairs in kinds.values():
        for (a, b), speed, middle in slowest({pair: findings.links[pair].speed for pair in pairs}):
            if speed * SLOW_LINK < middle:
                yield f"The link of ranks {a} and {b} has far less bandwidth than the others.", TRY["slow link"]
