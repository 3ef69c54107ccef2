"""One plan: what a job needs, before it runs. Numbers in base units; description.py puts them into words."""

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
    """How well a step uses a GPU."""

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
class Bottleneck:
    """What limits a job: memory if it does not fit, else time; and what is most of it."""

    limit: str
    largest: str


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
        totals = [stage["total"] for stage in self.stages]
        return totals.index(max(totals))

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
    def bottleneck(self) -> Bottleneck:
        if self.fits:
            return Bottleneck("time", largest(self.step.parts))
        kinds = dict(self.stages[self.fullest])
        del kinds["total"]
        kinds["states"] = sum(kinds.pop(state) for state in STATES)
        return Bottleneck("memory", largest(kinds))

    def utilization_in(self, seconds: float) -> Utilization:
        """That of a step which takes so long."""
        speed = self.tokens / seconds
        flops = self.conventions.flops
        model = rates.achieved(self.model, speed, self.layout.gpus, flops)
        hardware = rates.achieved(self.model, speed, self.layout.gpus, flops, self.layout.recompute)
        achieved = model if self.conventions.achieved == "model" else hardware
        return Utilization(mfu=model / self.peak, hfu=hardware / self.peak, achieved=achieved)

    @property
    def utilization(self) -> Utilization:
        return self.utilization_in(self.step.seconds)

    @property
    def measured(self) -> Measured | None:
        seconds = self.job.step_seconds
        if self.job.tokens_per_second:
            seconds = self.tokens / self.job.tokens_per_second
        if seconds == 0:
            return None
        return Measured(seconds, self.step.seconds / seconds - 1, self.utilization_in(seconds))

    @cached_property
    def run(self) -> Run:
        """Days, failures, checkpoints, goodput and cost; from the measured seconds of a step where they are known."""
        job = self.job
        nodes = self.cluster.nodes
        failure_rate = self.cluster.failures_per_node_day
        run = Run()
        if failure_rate:
            interval = failures.checkpoint_interval(job.save_seconds, nodes, failure_rate)
            run = Run(
                mttf_hours=failures.mttf_hours(nodes, failure_rate),
                checkpoint_every_seconds=interval,
                goodput=failures.goodput(nodes, failure_rate, job.restart_seconds, interval, job.save_seconds),
            )
        if job.tokens == 0:
            return run

        days = self.days_without_failures
        run = replace(run, tokens=job.tokens, steps=job.tokens / self.tokens, days=days)
        if run.goodput == 0:
            return run  # Failures leave no progress, so the run never ends and has no price.
        if run.goodput and run.mttf_hours:
            days /= run.goodput
            count = days * 24 / run.mttf_hours
            between = failures.poisson_counts(count)
            run = replace(run, days_with_failures=days, failures=count, failures_between=between)
        if self.cluster.price_per_gpu_hour:
            run = replace(run, cost=self.cluster.gpus * 24 * days * self.cluster.price_per_gpu_hour)
        return run

    @property
    def days_without_failures(self) -> float:
        """Days of the job's tokens."""
        seconds = self.measured.seconds if self.measured else self.step.seconds
        if self.conventions.days == "8TP":
            speed = min(self.utilization_in(seconds).hfu, 1) * self.peak
            flops = rates.training_flops(self.model.parameters(), self.job.tokens, self.layout.recompute)
            return rates.training_days(flops, self.layout.gpus, speed)
        return self.job.tokens / self.tokens * seconds / 86400

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
        neighbours = list(self.neighbours())
        fitting = [(words, plan) for words, plan in neighbours if plan.fits]
        if fitting:
            words, fastest = min(fitting, key=lambda neighbour: neighbour[1].step.rounded)
            if self.fits and fastest.step.rounded >= self.step.rounded:
                return Next(f"stay: none of {len(fitting)} layouts one step away is faster")
            return Next(words, fastest.layout, fastest.step.seconds)
        if neighbours:
            words, smallest = min(neighbours, key=lambda neighbour: neighbour[1].bytes)
            if smallest.bytes < self.bytes:
                return Next(f"{words}: it does not fit either, but needs less", smallest.layout)
        return Next("more GPUs, or a smaller model: no layout one step away needs less memory")


def plan(
    model: str | dict[str, Any] | Model,
    cluster: str | dict[str, Any] | Cluster,
    layout: dict[str, Any] | Layout,
    conventions: dict[str, Any] | Conventions | None = None,
    job: dict[str, Any] | Job | None = None,
) -> Plan:
    """The Plan of one job. A cluster that is a preset's name gets as many GPUs as the layout has."""
    model = model_of(model)
    layout = Layout.of(layout)
    gpus = layout.gpus if isinstance(cluster, str) else 0
    cluster = cluster_of(cluster, gpus)
    layout.check(model, cluster)
    return Plan(model, cluster, layout, Conventions.of(conventions or {}), Job.of(job or {}))


def changes_of(layout: Layout, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """{field: value} of each change that is one step away; not all of them are possible."""
    for grown, shrunk in itertools.permutations(MESH, 2):
        if getattr(layout, shrunk) % 2 == 0:
            yield {grown: 2 * getattr(layout, grown), shrunk: getattr(layout, shrunk) // 2}
    yield {"micro_batch": 2 * layout.micro_batch}
    yield {"micro_batch": layout.micro_batch // 2}
    for name in ("recompute", "zero"):
        for value in get_args(Layout.__annotations__[name]):
            yield {name: value}
    if layout.tp > 1:
        yield {"sequence_parallel": True}
        yield {"sequence_parallel": False}
    for parts in (1, 2, 4):
        yield {"interleave": parts}
    if layout.shard:
        yield {"shard": 0}
    elif layout.zero and layout.data_ranks > cluster.gpus_per_node:
        yield {"shard": cluster.gpus_per_node}


def largest(sizes: dict[str, float]) -> str:
    """The name of the largest."""
    return max(sizes, key=lambda name: sizes[name])
