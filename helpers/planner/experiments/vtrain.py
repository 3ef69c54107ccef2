"""109 measured steps (vTrain, Bang et al. 2024), each predicted by a fit that did not see its model size.

The planner was made with 88 of them in view, those of three sizes, in book/recorded/vtrain.csv: step_time.py holds what
a fit on all of these gives. The 21 steps of the fourth size, in vtrain_175b.csv, were only predicted. "How good is the
plan?" shows the errors.
"""

import csv
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from helpers.planner.cluster import PRESETS, Cluster
from helpers.planner.conventions import Conventions
from helpers.planner.corrections import CORRECTIONS
from helpers.planner.experiments.fitting import factor_of_most, fit_factors
from helpers.planner.layout import Layout
from helpers.planner.model import Model, model_of
from helpers.planner.step_time import FITTED, Constants, StepWork, count_work, seconds_of_parts

ROOT = Path(__file__).parents[3]  # of the repository
MEASURED = ROOT / "book" / "recorded" / "vtrain.csv"
UNSEEN = ROOT / "book" / "recorded" / "vtrain_175b.csv"
MEGATRON = Conventions(states="zero")  # gradients are summed in 16 bits
# Where the fit starts, and near to which it stays. in_node was measured: an all-reduce of 16 GiB on 8 A100s reached
# 234.89 of 300 GB/s.
PRIOR = Constants(matmul=0.75, memory=0.8, in_node=0.78, between=0.75, launch=0.001)
# How near: the standard deviation of each constant's logarithm. Only in_node's is narrow.
WIDTH = Constants(matmul=0.15, memory=0.15, in_node=0.05, between=0.25, launch=1.0)
NOISE = 0.08  # the standard deviation of log(predicted / measured): a step is usually off by some 8 %
GPUS_PER_NODE = 8
# Bytes a second. The file does not name the network. In vTrain's configurations of these runs
# (config/validation/multi), a node has 800 Gb/s, which its 8 GPUs share.
LINK_BETWEEN = 12.5e9


@dataclass(frozen=True)
class Step:
    """A step that was measured."""

    model: Model
    layout: Layout
    cluster: Cluster
    seconds: float

    @functools.cached_property
    def work(self) -> StepWork:
        """What the step computes and sends. It is counted once for all fits."""
        return count_work(self.model, self.layout, self.cluster, MEGATRON)

    def log_error(self, constants: Constants) -> float:
        """log(predicted / measured) of the step's seconds, if these constants were the planner's."""
        # None of the corrections applies to these steps, so it does not matter which ones are given.
        predicted = sum(seconds_of_parts(self.work, constants, CORRECTIONS).values())
        return float(np.log(predicted / self.seconds))


@functools.cache
def measured(path: Path = MEASURED) -> tuple[Step, ...]:
    """Read a file of vTrain's steps: GPTs in float16, with full recomputation, on nodes of 8 A100s with NVLink."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return tuple(step_of(row) for row in csv.DictReader(lines))


def step_of(row: dict[str, str]) -> Step:
    """The measured step of a row of vTrain's file, with its model, layout and cluster as the planner's records."""
    model = model_of(
        {
            "preset": "gpt-175b",
            "name": f"{row['Parameters (billion)']}B",
            "layers": int(row["# layers"]),
            "width": int(row["hidden size"]),
            "heads": int(row["attention heads"]),
            "seq": int(row["sequence length"]),
        }
    )
    layout = Layout(
        dp=int(row["data parallelism"]),
        tp=int(row["tensor parallelism"]),
        pp=int(row["pipeline parallelism"]),
        micro_batch=int(row["micro batch"]),
        batch=int(row["global batch"]),
        recompute="full",
        attention="scores",
        dtype="float16",
    )
    nodes = int(row["# GPUs"]) // GPUS_PER_NODE
    cluster = Cluster(**{**PRESETS["a100"], "nodes": nodes, "link_between": LINK_BETWEEN})
    seconds = float(row["iteration time (ms)"]) / 1000
    return Step(model, layout.check(model), cluster, seconds)


def fit(steps: Sequence[Step]) -> Constants:
    """The Constants whose predictions are nearest to measured steps and which stay near to PRIOR."""
    return fit_factors(PRIOR, WIDTH, NOISE, lambda constants: [step.log_error(constants) for step in steps])


@dataclass(frozen=True)
class PredictedSize:
    """A model size whose steps were predicted by a fit that saw none of them."""

    size: str
    gpus: int
    steps: int  # how many were measured
    mean_error: float  # the mean of |predicted / measured - 1|
    # How good the planner's choice is: the measured seconds of the layout that is predicted to be the fastest, divided
    # by the seconds of the layout that was measured to be the fastest. 1 is best.
    slowdown: float
    log_errors: list[float]  # log(predicted / measured) of each step


def left_out(steps: Sequence[Step] = ()) -> list[PredictedSize]:
    """Predict the steps of each model size with constants that were fitted on the other sizes.

    steps: measured ones; by default those with which the planner was made. Each size was measured on one number of
    GPUs, so a number of GPUs is left out with its size.
    """
    steps = steps or measured()
    sizes = list(dict.fromkeys(step.model.name for step in steps))  # each once, in the order of the steps

    results = []
    for size in sizes:
        steps_of_size = [step for step in steps if step.model.name == size]
        steps_of_other_sizes = [step for step in steps if step.model.name != size]
        results.append(predict(steps_of_size, fit(steps_of_other_sizes)))
    return results


def unseen() -> PredictedSize:
    """Predict the steps that the planner was made without, with the planner's own constants."""
    return predict(measured(UNSEEN), FITTED)


def predict(steps: Sequence[Step], constants: Constants) -> PredictedSize:
    """Compare predicted with measured seconds for steps of one model size, each with a layout of its own."""
    log_errors = np.array([step.log_error(constants) for step in steps])  # log(predicted / measured)
    measured_seconds = np.array([step.seconds for step in steps])
    predicted_seconds = np.exp(log_errors) * measured_seconds
    relative_errors = np.expm1(log_errors)  # predicted / measured - 1
    planners_choice = predicted_seconds.argmin()
    return PredictedSize(
        size=steps[0].model.name,
        gpus=steps[0].layout.gpus,
        steps=len(steps),
        mean_error=float(np.abs(relative_errors).mean()),
        slowdown=float(measured_seconds[planners_choice] / measured_seconds.min()),
        log_errors=log_errors.tolist(),
    )


def mean_error_of_all(sizes: Sequence[PredictedSize]) -> float:
    """Mean of |predicted / measured - 1| over all steps."""
    return sum(size.mean_error * size.steps for size in sizes) / sum(size.steps for size in sizes)


def interval_factor(sizes: Sequence[PredictedSize]) -> float:
    """The factor by which at most COVERAGE of the left-out predictions are off: INTERVAL_FACTOR of step_time.py."""
    log_errors: list[float] = []
    for size in sizes:
        log_errors += size.log_errors
    return factor_of_most(log_errors)


def coverage() -> float:
    """The share of measured steps inside an interval that was predicted without any step of their model size.

    For each size, both the constants and the interval's factor come from the other sizes alone. To find the factor,
    each of the other sizes is predicted by a fit that saw neither it nor the size in question.
    """
    steps_inside = 0
    for size in left_out():
        steps_of_other_sizes = [step for step in measured() if step.model.name != size.size]
        log_factor = np.log(interval_factor(left_out(steps_of_other_sizes)))
        for log_error in size.log_errors:
            if abs(log_error) <= log_factor:
                steps_inside += 1
    return steps_inside / len(measured())
