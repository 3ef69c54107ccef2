"""One plan: what a job needs, before it runs. Numbers in base units; report.py puts them into words and into JSON."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

from helpers.planner import failures, rates
from helpers.planner.cluster import Cluster, cluster_of
from helpers.planner.communication import Collective, collectives
from helpers.planner.conventions import Conventions, conventions_of
from helpers.planner.layout import Layout, layout_of
from helpers.planner.memory import memory
from helpers.planner.model import Model, model_of
from helpers.planner.records import LARGEST, SMALLEST, PlanError, check_fields, from_table
from helpers.planner.step_time import StepTime, step_time

STATES = ("parameters", "gradients", "optimizer")
MESH = ("dp", "tp", "pp", "cp")


@dataclass(frozen=True)
class Job:
    """What the run is: its tokens, what a checkpoint costs, and what was measured, if anything."""

    tokens: float = 0  # of the whole run; 0 for not known
    save_seconds: float = 60  # of a checkpoint for which training stops: w
    restart_seconds: float = 300  # from a failure to the first new step: u0
    step_seconds: float = 0  # measured
    tokens_per_second: float = 0  # measured, of all GPUs

    LIMITS: ClassVar[dict[str, tuple[float, float]]] = {"save_seconds": (SMALLEST, LARGEST)}

    def __post_init__(self) -> None:
        check_fields(Job, vars(self))
        if self.step_seconds and self.tokens_per_second:
            raise PlanError("step_seconds and tokens_per_second say the same.\nGive one of them.")


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
    """What a job needs."""

    model: Model
    cluster: Cluster
    layout: Layout
    conventions: Conventions
    job: Job
    stages: list[dict[str, float]]  # {kind: bytes} of a rank of each stage
    fullest: int  # the stage that needs most
    collectives: list[Collective]  # of a rank of the fullest stage
    step: StepTime
    tokens: int  # of a step
    bubble: float
    utilization: Utilization
    measured: Measured | None
    run: Run
    next: Next

    @property
    def peak(self) -> float:
        """FLOP/s of one GPU."""
        return self.conventions.peak_of(self.cluster, self.layout.dtype)

    @property
    def fits(self) -> bool:
        return self.stages[self.fullest]["total"] <= self.cluster.memory

    @property
    def binds(self) -> tuple[str, str]:
        """(the limit that binds, what is most of it)."""
        if self.fits:
            return "time", max(self.step.parts, key=self.step.parts.__getitem__)
        sizes = self.stages[self.fullest]
        kinds = {kind: size for kind, size in sizes.items() if kind not in ("total", *STATES)}
        kinds["states"] = sum(sizes[kind] for kind in STATES)
        return "memory", max(kinds, key=kinds.__getitem__)


def plan(
    model: str | dict[str, Any] | Model,
    cluster: str | dict[str, Any] | Cluster,
    layout: dict[str, Any] | Layout,
    conventions: dict[str, Any] | Conventions | None = None,
    job: dict[str, Any] | Job | None = None,
) -> Plan:
    """The plan of one job. A cluster that is a preset's name gets as many GPUs as the layout has."""
    model, conventions, layout = model_of(model), conventions_of(conventions), layout_of(layout)
    cluster = cluster_of(cluster, layout.gpus if isinstance(cluster, str) else 0)
    layout.check(model, cluster)
    job = job if isinstance(job, Job) else from_table(Job, job or {})
    stages = memory(model, layout, conventions)
    fullest = max(range(len(stages)), key=lambda stage: stages[stage]["total"])
    step, tokens = step_time(model, layout, cluster, conventions), layout.batch * model.seq
    seconds = job.step_seconds or (job.tokens_per_second and tokens / job.tokens_per_second)

    def utilization(seconds: float) -> Utilization:
        peak = conventions.peak_of(cluster, layout.dtype)
        of_model, of_hardware = (
            rates.achieved(model, tokens / seconds, layout.gpus, conventions.flops, recompute)
            for recompute in ("none", layout.recompute)
        )
        achieved = of_model if conventions.achieved == "model" else of_hardware
        return Utilization(of_model / peak, of_hardware / peak, achieved)

    return Plan(
        model=model,
        cluster=cluster,
        layout=layout,
        conventions=conventions,
        job=job,
        stages=stages,
        fullest=fullest,
        collectives=collectives(model, layout, cluster, conventions, stage=fullest),
        step=step,
        tokens=tokens,
        bubble=rates.bubble(layout.pp, layout.micro_batches, layout.interleave, conventions.bubble),
        utilization=utilization(step.seconds),
        measured=Measured(seconds, step.seconds / seconds - 1, utilization(seconds)) if seconds else None,
        run=run_of(model, cluster, layout, conventions, job, seconds or step.seconds),
        next=try_next(model, cluster, layout, conventions, step.seconds),
    )


def run_of(model: Model, cluster: Cluster, layout: Layout, conventions: Conventions, job: Job, seconds: float) -> Run:
    """Days, failures, checkpoints, goodput and cost of a run whose steps take so long."""
    run, rate, tokens = Run(), cluster.failures_per_node_day, layout.batch * model.seq
    goodput, hours = 1.0, 0.0
    if rate:
        hours = failures.mttf_hours(cluster.nodes, rate)
        every = failures.checkpoint_interval(job.save_seconds, cluster.nodes, rate)
        goodput = failures.goodput(cluster.nodes, rate, job.restart_seconds, every, job.save_seconds)
        run = replace(run, mttf_hours=hours, checkpoint_every_seconds=every, goodput=goodput)
    if not job.tokens:
        return run
    days = job.tokens / tokens * seconds / 86400
    if conventions.days == "8TP":
        speed = rates.achieved(model, tokens / seconds, layout.gpus, conventions.flops, layout.recompute)
        speed = min(speed, conventions.peak_of(cluster, layout.dtype))
        flops = rates.training_flops(model.parameters(), job.tokens, layout.recompute)
        days = rates.training_days(flops, layout.gpus, speed)
    run = replace(run, tokens=job.tokens, steps=job.tokens / tokens, days=days)
    if not goodput:
        return run  # it never ends, and has no price
    if rate:
        days = days / goodput
        count = days * 24 / hours
        between = failures.poisson_counts(count)
        run = replace(run, days_with_failures=days, failures=count, failures_between=between)
    if cluster.price_per_gpu_hour:
        run = replace(run, cost=cluster.gpus * 24 * days * cluster.price_per_gpu_hour)
    return run


def changes_of(layout: Layout, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """{field: value} of what is one step away; not all of it is possible."""
    for up, down in itertools.permutations(MESH, 2):
        if getattr(layout, down) % 2 == 0:
            yield {up: 2 * getattr(layout, up), down: getattr(layout, down) // 2}
    yield {"micro_batch": 2 * layout.micro_batch}
    yield {"micro_batch": layout.micro_batch // 2}
    yield from ({name: value} for name in ("recompute", "zero") for value in Layout.CHOICES[name])
    yield from ({"sequence_parallel": value} for value in (True, False) if layout.tp > 1)
    yield from ({"interleave": value} for value in (1, 2, 4))
    if layout.shard:
        yield {"shard": 0}
    elif layout.zero and layout.data_ranks > cluster.gpus_per_node:
        yield {"shard": cluster.gpus_per_node}


def neighbours(model: Model, cluster: Cluster, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """(what changes, Layout), one step away and possible."""
    for changes in changes_of(layout, cluster):
        try:
            other = replace(layout, **changes).check(model, cluster)
        except PlanError:
            continue
        if other != layout:
            yield ", ".join(f"{name} = {str(value).lower()}" for name, value in changes.items()), other


def try_next(model: Model, cluster: Cluster, layout: Layout, conventions: Conventions, seconds: float) -> Next:
    """The layout one step away that fits and is fastest, if it is faster; where none fits, what needs least memory."""

    def size(layout: Layout) -> float:
        return max(stage["total"] for stage in memory(model, layout, conventions))

    here = size(layout)
    options = [(size(other), words, other) for words, other in neighbours(model, cluster, layout)]
    fitting = [
        (step_time(model, other, cluster, conventions).seconds, words, other)
        for needs, words, other in options
        if needs <= cluster.memory
    ]
    if fitting:
        least, words, other = min(fitting, key=lambda option: option[0])
        if here > cluster.memory or least < seconds:
            return Next(words, other, least)
        return Next(f"stay: none of {len(fitting)} layouts one step away is faster")
    least, words, other = min(options, key=lambda option: option[0], default=(here, "", layout))
    if least < here:
        return Next(f"{words}: it does not fit either, but needs less", other)
    return Next("more GPUs, or a smaller model: no layout one step away needs less memory")


def settings(layout: Layout) -> dict[str, Any]:
    """{field: value} of a layout where it differs from the defaults, and always its sizes."""
    always = (*MESH, "micro_batch", "batch")
    defaults = {field.name: field.default for field in fields(layout)}
    return {name: value for name, value in asdict(layout).items() if name in always or value != defaults[name]}
