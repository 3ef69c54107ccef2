"""What the doctor found, as a record that is the same on every rank. ``problems`` and ``report`` read it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar

from helpers.doctor.facts import Facts
from helpers.doctor.trials import Speeds, Trial

Key = TypeVar("Key")


@dataclass(frozen=True)
class Findings:
    """What ``examine`` found. Dictionaries by rank leave out the ranks that did not answer."""

    world_size: int
    timeout: float  # seconds
    store_address: str  # HOST:PORT
    backend: str  # the backend on which the trials began, "nccl" or "gloo"
    device: str  # cpu or cuda
    facts: dict[int, Facts]  # of all ranks that took part in the roll call
    members: list[int]  # the ranks that still answered at the end
    lost: dict[int, str] = field(default_factory=dict)  # {rank: the step at which it stopped answering}
    errors: dict[str, dict[int, str]] = field(default_factory=dict)  # {step: {rank: what it raised}}
    unreachable: dict[int, dict[int, str]] = field(default_factory=dict)  # {rank: {rank it cannot connect to: why}}
    clock_offsets: dict[int, float] = field(default_factory=dict)  # {rank: seconds ahead of the first rank's clock}
    # {collective: {rank: its trial, or None where the collective raised}}
    collectives: dict[str, dict[int, Trial | None]] = field(default_factory=dict)
    links: dict[tuple[int, int], Trial] = field(default_factory=dict)  # {(lower rank, higher rank): trial of the link}
    compute_speeds: dict[int, float | None] = field(default_factory=dict)  # {rank: FLOP/s of its own matrix product}
    plan_speeds: dict[int, Speeds | None] = field(default_factory=dict)  # {rank: the speeds that a plan counts on}

    @property
    def hosts(self) -> list[str]:
        """The name of each host, once, in the order of ranks."""
        names = [facts.host for facts in self.facts.values()]
        return list(dict.fromkeys(names))  # A dictionary keeps one of equal keys, and their order.

    def host(self, rank: int) -> str:
        """The name of the rank's host."""
        return self.facts[rank].host


@dataclass(frozen=True)
class Slowest(Generic[Key]):
    """The slowest of several ranks or pairs of ranks."""

    key: Key  # the rank, or the pair of ranks
    speed: float
    median_speed: float  # of all ranks or pairs, the slowest one too


def slowest(speeds: Mapping[Key, float | None]) -> Slowest[Key] | None:
    """Find the slowest of {a rank or a pair of ranks: its speed, or None if it is not known}.

    Returns None if fewer than two speeds are known, because then there is nothing to compare with.
    """
    known = {key: speed for key, speed in speeds.items() if speed}
    if len(known) < 2:
        return None
    slowest_key = min(known, key=lambda key: known[key])
    return Slowest(key=slowest_key, speed=known[slowest_key], median_speed=median(known.values()))
