"""A plan: what a job needs, before it runs. Its numbers are in base units, and report.py puts them into words."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from helpers.planner import failures, rates
from helpers.planner.cluster import Cluster, cluster_of
from helpers.planner.communication import Collective, collectives
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.memory import memory
from helpers.planner.model import Model, model_of
from helpers.planner.records import Record
from helpers.planner.step_time import StepTime, step_time

STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Job(Record):
    """What is known of the whole run: its tokens, and what a checkpoint and a failure cost."""

    tokens: float = 0  # of the whole run; 0 for not known
    save_seconds: float = 60  # how long training stops for a checkpoint
    restart_seconds: float = 300  # from a failure to the first new step

    POSITIVE: ClassVar[tuple[str, ...]] = ("save_seconds",)


@dataclass(frozen=True)
class Utilization:
    """FLOP/s of a GPU in a step as shares of its peak, in 0..1."""

    mfu: float  # of the model's FLOPs
    hfu: float  # of the FLOPs with recomputation


@dataclass(frozen=True)
class Run:
    """The numbers of the whole run. None stands for what cannot be known."""

    # These are known if the cluster has a rate of failures.
    mttf_hours: float | None = None
    checkpoint_every_seconds: float | None = None
    goodput: float | None = None
    # These are known if the job has a number of tokens.
    tokens: float | None = None
    steps: float | None = None
    days: float | None = None  # without failures
    # These are known if it has both.
    days_with_failures: float | None = None
    failures: float | None = None
    # This is known if the job has tokens and the cluster a price.
    cost: float | None = None  # in the price's currency


@dataclass(frozen=True)
class Bottleneck:
    """What limits a job."""

    limit: str  # "memory" if the job does not fit, otherwise "time"
    largest: str  # what takes most of it, such as "activations"


@dataclass(frozen=True)
class Plan:
    """What a job needs. Each number is computed when it is first read."""

    model: Model
    cluster: Cluster
    layout: Layout
    conventions: Conventions
    job: Job

    @property
    def peak(self) -> float:
        """FLOP/s of one GPU: the convention's if it has one, otherwise the cluster's."""
        return self.conventions.peak or self.cluster.peak(self.layout.dtype)

    @cached_property
    def stages(self) -> list[dict[str, float]]:
        """What a rank of each pipeline stage needs: [{kind: bytes}], with the sum as "total"."""
        return memory(self.model, self.layout, self.conventions)

    @property
    def fullest(self) -> int:
        """The number of the stage whose ranks need most memory."""
        totals = [stage["total"] for stage in self.stages]
        return totals.index(max(totals))

    @property
    def kinds(self) -> dict[str, float]:
        """What a rank of the fullest stage needs: {kind: bytes}, without the total."""
        kinds = dict(self.stages[self.fullest])
        del kinds["total"]
        return kinds

    @property
    def bytes(self) -> float:
        """Bytes that a rank of the fullest stage needs."""
        return self.stages[self.fullest]["total"]

    @property
    def fits(self) -> bool:
        """Whether a rank of the fullest stage needs no more memory than its GPU has."""
        return self.bytes <= self.cluster.memory

    @cached_property
    def collectives(self) -> list[Collective]:
        """The collectives of a step on a rank of the fullest stage."""
        return collectives(self.model, self.layout, self.cluster, self.conventions, self.fullest)

    @cached_property
    def step(self) -> StepTime:
        """Predicted seconds of a step."""
        return step_time(self.model, self.layout, self.cluster, self.conventions)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.layout.batch * self.model.seq

    @property
    def bubble(self) -> float:
        """The pipeline's idle time as a share of the ideal time, in which no stage waits."""
        layout = self.layout
        return rates.bubble(layout.pp, layout.micro_batches, layout.interleave)

    @property
    def bottleneck(self) -> Bottleneck:
        """What limits the job: memory if it does not fit, otherwise time; and what takes most of it.

        Parameters, gradients and optimizer state count together, as "states".
        """
        if self.fits:
            return Bottleneck("time", largest(self.step.parts))
        states: float = 0
        others = {}
        for kind, size in self.kinds.items():
            if kind in STATES:
                states += size
            else:
                others[kind] = size
        return Bottleneck("memory", largest({**others, "states": states}))

    @property
    def utilization(self) -> Utilization:
        """MFU and HFU of the predicted step."""
        tokens_per_second = self.tokens / self.step.seconds
        gpus = self.layout.gpus
        count = self.conventions.flops
        # FLOP/s of each GPU, without and with what the backward computes again.
        model_flops = rates.achieved(self.model, tokens_per_second, gpus, count)
        hardware_flops = rates.achieved(self.model, tokens_per_second, gpus, count, self.layout.recompute)
        return Utilization(mfu=model_flops / self.peak, hfu=hardware_flops / self.peak)

    @cached_property
    def run(self) -> Run:
        """Days, failures, checkpoints, goodput and cost of the whole run, as far as they are known (see Run)."""
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

        seconds_per_day = 86400
        hours_per_day = 24
        steps = job.tokens / self.tokens
        days = steps * self.step.seconds / seconds_per_day
        run = replace(run, tokens=job.tokens, steps=steps, days=days)
        if run.goodput == 0:
            return run  # Failures leave no progress, so the run never ends and has no price.
        days_to_pay = days
        if run.goodput and run.mttf_hours:  # They are None where the rate of failures is not known.
            days_to_pay = days / run.goodput
            failures_of_run = days_to_pay * hours_per_day / run.mttf_hours
            run = replace(run, days_with_failures=days_to_pay, failures=failures_of_run)
        if self.cluster.price_per_gpu_hour:
            gpu_hours = self.cluster.gpus * hours_per_day * days_to_pay
            run = replace(run, cost=gpu_hours * self.cluster.price_per_gpu_hour)
        return run


def plan(
    model: str | dict[str, Any] | Model,
    cluster: str | dict[str, Any] | Cluster,
    layout: dict[str, Any] | Layout,
    conventions: dict[str, Any] | Conventions | None = None,
    job: dict[str, Any] | Job | None = None,
) -> Plan:
    """Plan one job, such as plan("llama3-8b", "h100", {"dp": 8, "zero": 3}).

    Each argument is the planner's record itself or a dict of its fields. A model and a cluster may also be the name of
    a preset. The cluster of a preset gets as many GPUs as the layout has. Raises PlanError if a field is wrong, or if
    the layout cannot divide the model or the cluster.
    """
    model = model_of(model)
    layout = Layout.of(layout)
    if isinstance(cluster, str):
        gpus = layout.gpus
    else:
        gpus = 0  # as many as the cluster's fields say
    cluster = cluster_of(cluster, gpus)
    layout.check(model, cluster)
    return Plan(
        model=model,
        cluster=cluster,
        layout=layout,
        conventions=Conventions.of(conventions or {}),
        job=Job.of(job or {}),
    )


def largest(sizes: dict[str, float]) -> str:
    """The name with the largest size, of {name: size}."""
    return max(sizes, key=lambda name: sizes[name])
