"""One plan: what a job needs, before it runs. Numbers in base units; report.py puts them into words and into JSON."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, get_args

from helpers.planner import failures, rates
from helpers.planner.cluster import Cluster, cluster_of
from helpers.planner.communication import Collective, collectives
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.memory import memory
from helpers.planner.model import Model, model_of
from helpers.planner.records import LARGEST, SMALLEST, PlanError, Record, refuse
from helpers.planner.step_time import StepTime, step_time

STATES = ("parameters", "gradients", "optimizer")
MESH = ("dp", "tp", "pp", "cp")


@dataclass(frozen=True)
class Job(Record):
    """What the run is: its tokens, what a checkpoint costs, and what was measured, if anything."""

    tokens: float = 0  # of the whole run; 0 for not known
    save_seconds: float = 60  # of a checkpoint for which training stops: w
    restart_seconds: float = 300  # from a failure to the first new step: u0
    step_seconds: float = 0  # measured
    tokens_per_second: float = 0  # measured, of all GPUs

    LIMITS: ClassVar[dict[str, tuple[float, float]]] = {"save_seconds": (SMALLEST, LARGEST)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_seconds and self.tokens_per_second:
            refuse("step_seconds and tokens_per_second say the same", "one of them")


@dataclass(frozen=True)
class Utilization:
    """What a step of so many seconds makes of a GPU."""

    mfu: float
    hfu: float
    achieved: float  # FLOP/s, of the model or of the hardware, by the convention


@dataclass(frozen=True)
class Measured:
    """The step that the job has measured, beside the prediction."""

    seconds: float
    error: float  # predicted / measured - 1
    utilization: Utilization


@dataclass(frozen=True)
class Run:
    """The whole run. None where the job has no tokens, the cluster no rate of failures, or no price."""

    mttf_hours: float | None = None
    checkpoint_every_seconds: float | None = None
    goodput: float | None = None
    tokens: float | None = None
    steps: float | None = None
    days: float | None = None  # without failures
    days_with_failures: float | None = None
    failures: float | None = None
    failures_between: tuple[int, int] | None = None  # in 95 %
    cost: float | None = None  # in the price's currency


@dataclass(frozen=True)
class Next:
    """What to try: in words, and as a layout with its seconds where that helps."""

    words: str
    layout: Layout | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Plan:
    """What a job needs: each number is computed when it is first read."""

    model: Model
    cluster: Cluster
    layout: Layout
    conventions: Conventions
    job: Job

    @property
    def peak(self) -> float:
        """FLOP/s of one GPU: the convention's, or the cluster's."""
        return self.conventions.peak or self.cluster.peak(self.layout.dtype)

    @cached_property
    def stages(self) -> list[dict[str, float]]:
        """[{kind: bytes}] of a rank of each stage."""
        return memory(self.model, self.layout, self.conventions)

    @property
    def fullest(self) -> int:
        """The stage that needs most."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage]["total"])

    @property
    def bytes(self) -> float:
        """What a rank of that stage needs."""
        return self.stages[self.fullest]["total"]

    @property
    def fits(self) -> bool:
        return self.bytes <= self.cluster.memory

    @cached_property
    def collectives(self) -> list[Collective]:
        """Those of a step on a rank of the fullest stage."""
        return collectives(self.model, self.layout, self.cluster, self.conventions, self.fullest)

    @cached_property
    def step(self) -> StepTime:
        """Predicted seconds of a step."""
        return step_time(self.model, self.layout, self.cluster, self.conventions)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.layout.batch * self.model.seq

    @property
    def bubble(self) -> float:
        layout = self.layout
        return rates.bubble(layout.pp, layout.micro_batches, layout.interleave, self.conventions.bubble)

    @property
    def binds(self) -> tuple[str, str]:
        """(the limit that binds, what is most of it)."""
        if self.fits:
            return "time", max(self.step.parts, key=self.step.parts.__getitem__)
        sizes = self.stages[self.fullest]
        kinds = {kind: size for kind, size in sizes.items() if kind not in ("total", *STATES)}
        kinds["states"] = sum(sizes[kind] for kind in STATES)
        return "memory", max(kinds, key=kinds.__getitem__)

    def utilization_in(self, seconds: float) -> Utilization:
        """That of a step which takes so long."""
        of_model, of_hardware = (
            rates.achieved(self.model, self.tokens / seconds, self.layout.gpus, self.conventions.flops, recompute)
            for recompute in ("none", self.layout.recompute)
        )
        achieved = of_model if self.conventions.achieved == "model" else of_hardware
        return Utilization(of_model / self.peak, of_hardware / self.peak, achieved)

    @property
    def utilization(self) -> Utilization:
        return self.utilization_in(self.step.seconds)

    @property
    def measured(self) -> Measured | None:
        seconds = self.job.step_seconds or (self.job.tokens_per_second and self.tokens / self.job.tokens_per_second)
        if not seconds:
            return None
        return Measured(seconds, self.step.seconds / seconds - 1, self.utilization_in(seconds))

    @cached_property
    def run(self) -> Run:
        """Days, failures, checkpoints, goodput and cost; from the measured seconds of a step where they are known."""
        run, job, nodes, rate = Run(), self.job, self.cluster.nodes, self.cluster.failures_per_node_day
        seconds = self.measured.seconds if self.measured else self.step.seconds
        if rate:
            every = failures.checkpoint_interval(job.save_seconds, nodes, rate)
            goodput = failures.goodput(nodes, rate, job.restart_seconds, every, job.save_seconds)
            run = Run(failures.mttf_hours(nodes, rate), every, goodput)
        if not job.tokens:
            return run
        days = job.tokens / self.tokens * seconds / 86400
        if self.conventions.days == "8TP":
            speed = min(self.utilization_in(seconds).hfu, 1) * self.peak
            flops = rates.training_flops(self.model.parameters(), job.tokens, self.layout.recompute)
            days = rates.training_days(flops, self.layout.gpus, speed)
        run = replace(run, tokens=job.tokens, steps=job.tokens / self.tokens, days=days)
        if run.goodput == 0:
            return run  # it never ends, and has no price
        if run.goodput and run.mttf_hours:
            days /= run.goodput
            count = days * 24 / run.mttf_hours
            between = failures.poisson_counts(count)
            run = replace(run, days_with_failures=days, failures=count, failures_between=between)
        if price := self.cluster.price_per_gpu_hour:
            run = replace(run, cost=self.cluster.gpus * 24 * days * price)
        return run

    def neighbours(self) -> Iterator[tuple[str, "Plan"]]:
        """(what changes, Plan) of each possible layout one step away."""
        for changes in changes_of(self.layout, self.cluster):
            try:
                layout = self.layout.with_(**changes).check(self.model, self.cluster)
            except PlanError:
                continue
            if layout != self.layout:
                words = ", ".join(f"{name} = {str(value).lower()}" for name, value in changes.items())
                yield words, replace(self, layout=layout)

    @cached_property
    def next(self) -> Next:
        """The layout one step away that fits and is fastest, if it is faster; if none fits, what needs least memory."""
        options = list(self.neighbours())
        if fitting := [(words, other) for words, other in options if other.fits]:
            words, best = min(fitting, key=lambda option: rounded(option[1].step.seconds))
            if not self.fits or rounded(best.step.seconds) < rounded(self.step.seconds):
                return Next(words, best.layout, best.step.seconds)
            return Next(f"stay: none of {len(fitting)} layouts one step away is faster")
        words, least = min(options, key=lambda option: option[1].bytes, default=("", self))
        if least.bytes < self.bytes:
            return Next(f"{words}: it does not fit either, but needs less", least.layout)
        return Next("more GPUs, or a smaller model: no layout one step away needs less memory")


def rounded(seconds: float) -> float:
    """Nine digits: layouts whose seconds differ by less are equally fast, on every machine."""
    return float(f"{seconds:.9g}")


def plan(
    model: str | dict[str, Any] | Model,
    cluster: str | dict[str, Any] | Cluster,
    layout: dict[str, Any] | Layout,
    conventions: dict[str, Any] | Conventions | None = None,
    job: dict[str, Any] | Job | None = None,
) -> Plan:
    """The Plan of one job. A cluster that is a preset's name gets as many GPUs as the layout has."""
    model, conventions, layout = model_of(model), Conventions.of(conventions or {}), Layout.of(layout)
    cluster = cluster_of(cluster, layout.gpus if isinstance(cluster, str) else 0)
    return Plan(model, cluster, layout.check(model, cluster), conventions, Job.of(job or {}))


def changes_of(layout: Layout, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """{field: value} of what is one step away; not all of it is possible."""
    for up, down in itertools.permutations(MESH, 2):
        if getattr(layout, down) % 2 == 0:
            yield {up: 2 * getattr(layout, up), down: getattr(layout, down) // 2}
    yield {"micro_batch": 2 * layout.micro_batch}
    yield {"micro_batch": layout.micro_batch // 2}
    for name in ("recompute", "zero"):
        yield from ({name: value} for value in get_args(Layout.__annotations__[name]))
    yield from ({"sequence_parallel": value} for value in (True, False) if layout.tp > 1)
    yield from ({"interleave": value} for value in (1, 2, 4))
    if layout.shard:
        yield {"shard": 0}
    elif layout.zero and layout.data_ranks > cluster.gpus_per_node:
        yield {"shard": cluster.gpus_per_node}
