"""Published steps of FSDP, stages, experts, long sequences and float8 on newer GPUs, planned beside their numbers.

A row of book/recorded/steps.csv has model, cluster, layout and conventions (the insides of TOML tables), tokens a
second and GPU, GiB of the fullest GPU (or nothing), and a source. corrections.py holds what a fit on every second row
gives, in the order of the rows' names. The other rows test it.
"""

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from helpers.planner.cluster import HOPPER
from helpers.planner.corrections import Corrections
from helpers.planner.experiments.fitting import factor_of_most, fit_factors
from helpers.planner.experiments.published import rows_of
from helpers.planner.plan import Plan, plan
from helpers.planner.step_time import FITTED, StepWork, count_work, seconds_of_parts

ROOT = Path(__file__).parents[3]  # of the repository
ROWS = ROOT / "book" / "recorded" / "steps.csv"
TABLES = ("model", "cluster", "layout", "conventions")  # the columns with what ``plan`` takes
# Where the fit starts, and near to which it stays. Most differences are expected to be small. An RMSNorm and a gated
# activation read and write about three times as much in PyTorch's own kernels, one for each operation, as fused.
PRIOR = Corrections(h100=0.8, engine=1.0, float8=1.0, experts=1.0, eager=3.0, parts=1.0, exposed=0.5)
# How near: the standard deviation of each factor's logarithm.
WIDTH = Corrections(h100=0.15, engine=0.15, float8=0.15, experts=0.3, eager=0.3, parts=0.3, exposed=0.3)
NOISE = 0.1  # the standard deviation of log(predicted / published)
# A plan from counts alone, as if programs on H100s reached the same shares of the peak as Megatron-DeepSpeed on A100s.
UNCORRECTED = Corrections(h100=1.0, engine=1.0, float8=1.0, experts=1.0, eager=1.0, parts=1.0, exposed=1.0)


@dataclass(frozen=True)
class PublishedStep:
    """A published step and its plan."""

    what: str
    plan: Plan
    published: float  # tokens a second and GPU
    gib: float  # of the fullest GPU; 0 where none was published
    source: str
    is_fitted: bool  # whether it is in the half that corrections.py is fitted on

    @property
    def planned(self) -> float:
        """Tokens a second and GPU of the plan."""
        return self.plan.tokens / self.plan.step.seconds / self.plan.layout.gpus

    @property
    def speed(self) -> float:
        """Planned tokens a second divided by the published ones: above 1 if the plan is too fast."""
        return self.planned / self.published

    def speed_by(self, corrections: Corrections) -> float:
        """What ``speed`` would be with other corrections."""
        return float(np.exp(-self.log_error(corrections)))

    @property
    def seconds(self) -> float:
        """Seconds of the published step."""
        return self.plan.tokens / self.published / self.plan.layout.gpus

    @property
    def held(self) -> bool:
        """Whether the published step lies in the plan's interval."""
        return self.plan.step.low <= self.seconds <= self.plan.step.high

    @property
    def planned_gib(self) -> float:
        """GiB of the fullest rank of the plan."""
        return self.plan.bytes / 2**30

    @property
    def memory(self) -> float:
        """Planned GiB divided by the published ones: above 1 if the plan needs more. 0 if none were published."""
        if self.gib == 0:
            return 0
        return self.planned_gib / self.gib

    @functools.cached_property
    def work(self) -> StepWork:
        """What the step computes and sends. It is counted once for all fits."""
        return count_work(self.plan.model, self.plan.layout, self.plan.cluster, self.plan.conventions)

    def log_error(self, corrections: Corrections) -> float:
        """log(predicted / published) of the step's seconds, if these corrections were the planner's."""
        constants = FITTED
        if self.plan.cluster.gpu in HOPPER:
            constants = replace(FITTED, matmul=FITTED.matmul * corrections.h100)
        seconds = sum(seconds_of_parts(self.work, constants, corrections).values())
        return float(np.log(seconds / self.seconds))


def published_steps() -> list[PublishedStep]:
    """Read the published steps of book/recorded/steps.csv and plan each of them, in the order of their names.

    Corrections are fitted on every second step, from the first one on. The other steps test the fit.
    """
    steps = []
    rows = sorted(rows_of(ROWS), key=lambda row: row["what"])
    for number, row in enumerate(rows):
        plan_arguments = {}
        for table in TABLES:
            # A column holds the inside of an inline table in TOML, such as 'dp = 8, zero = 3'.
            plan_arguments[table] = tomllib.loads(f"table = {{{row[table]}}}")["table"]
        steps.append(
            PublishedStep(
                what=row["what"],
                plan=plan(**plan_arguments),
                published=float(row["tokens"]),
                gib=float(row["gib"]) if row["gib"] else 0.0,
                source=row["source"],
                is_fitted=number % 2 == 0,
            )
        )
    return steps


def allocator_gaps(steps: Sequence[PublishedStep]) -> float:
    """The median share by which more memory was reserved than the planned bytes of tensors."""
    gaps = []
    for step in steps:
        if step.gib:
            published_bytes = step.gib * 2**30
            bytes_of_tensors = step.plan.bytes - step.plan.kinds["allocator's gaps"]
            gaps.append(published_bytes / bytes_of_tensors - 1)
    return median(gaps)


def fit(steps: Sequence[PublishedStep]) -> Corrections:
    """The Corrections whose predictions are nearest to published steps and which stay near to PRIOR."""
    return fit_factors(PRIOR, WIDTH, NOISE, lambda corrections: [step.log_error(corrections) for step in steps])


def interval_factor(steps: Sequence[PublishedStep]) -> float:
    """The factor by which at most COVERAGE of the steps are off, each by a fit on the other ones."""
    logs = []
    for left_out in steps:
        corrections = fit([step for step in steps if step is not left_out])
        logs.append(left_out.log_error(corrections))
    return factor_of_most(logs)
