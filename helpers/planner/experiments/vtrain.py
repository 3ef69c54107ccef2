"""88 measured steps (vTrain, Bang et al. 2024), each predicted by a fit that did not see its model size.

They are in book/recorded/vtrain.csv. Chapter 15 shows the errors; step_time.py holds what a fit on all of them gives.
"""

import csv
import functools
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from helpers.planner.cluster import PRESETS, Cluster
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.model import Model, model_of
from helpers.planner.step_time import COVERAGE, Constants, StepWork, count_work, seconds_of_parts

MEASURED = Path(__file__).parents[3] / "book" / "recorded" / "vtrain.csv"
MEGATRON = Conventions(states="zero")  # gradients are summed in 16 bits
# Where the fit starts, and what pulls it back: the standard deviation of each constant's logarithm. in_node was
# measured: 234.89 GB/s of 300, an all-reduce of 16 GiB on 8 A100s. The others are wide.
PRIOR = Constants(matmul=0.75, memory=0.8, in_node=0.78, between=0.75, launch=0.001)
WIDTH = Constants(matmul=0.15, memory=0.15, in_node=0.05, between=0.25, launch=1.0)
NOISE = 0.08  # of a measured step, as a share. A step that is off by more counts less, so that no outlier leads.


@dataclass(frozen=True)
class Step:
    """A step that was measured."""

    model: Model
    layout: Layout
    cluster: Cluster
    seconds: float

    @functools.cached_property
    def work(self) -> StepWork:
        """Counted once for all fits."""
        return count_work(self.model, self.layout, self.cluster, MEGATRON)

    def log_error(self, constants: Constants) -> float:
        """log(predicted / measured)."""
        predicted = sum(seconds_of_parts(self.work, constants).values())
        return float(np.log(predicted / self.seconds))


@functools.cache
def measured() -> tuple[Step, ...]:
    """vTrain's file: GPTs of Megatron-LM in float16, with full recomputation, on nodes of 8 A100s with NVLink.

    The network is not in the file: a 100 Gb/s share for each GPU is assumed.
    """
    lines = [line for line in MEASURED.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return tuple(step_of(row) for row in csv.DictReader(lines))


def step_of(row: dict[str, str]) -> Step:
    shape = {
        "layers": int(row["# layers"]),
        "width": int(row["hidden size"]),
        "heads": int(row["attention heads"]),
        "seq": int(row["sequence length"]),
    }
    model = model_of({"preset": "gpt-175b", "name": f"{row['Parameters (billion)']}B", **shape})
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
    cluster = Cluster(**{**PRESETS["a100"], "nodes": int(row["# GPUs"]) // 8, "link_between": 12.5e9})
    return Step(model, layout.check(model), cluster, float(row["iteration time (ms)"]) / 1000)


def fit(steps: Sequence[Step]) -> Constants:
    """The Constants that fit measured steps: least squares of log(predicted / measured), pulled to PRIOR.

    On the constants' logarithms. A step that is off by much more than NOISE counts by its distance, not its square
    (pseudo-Huber). Deterministic.
    """
    start = np.log(astuple(PRIOR))
    width = np.array(astuple(WIDTH))

    def residuals(logs: np.ndarray) -> np.ndarray:
        constants = Constants(*np.exp(logs))
        off = np.array([step.log_error(constants) for step in steps]) / NOISE
        robust = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))
        return np.concatenate([robust, (logs - start) / width])

    logs = least_squares(residuals, start, xtol=1e-12, ftol=1e-14).x
    return Constants(*np.exp(logs).tolist())


@dataclass(frozen=True)
class LeftOut:
    """A model size whose steps were predicted by a fit on the other sizes."""

    size: str
    gpus: int
    steps: int
    error: float  # mean of |predicted / measured - 1|
    picked: float  # seconds of the layout that is predicted to be fastest, beside the fastest measured: 1 is best
    logs: list[float]  # log(predicted / measured)


def left_out(steps: Sequence[Step] = ()) -> list[LeftOut]:
    """Each model size, left out. In vTrain's file each size has one number of GPUs: they are left out together."""
    steps = steps or measured()
    sizes = []
    for size in dict.fromkeys(step.model.name for step in steps):
        left = [step for step in steps if step.model.name == size]
        constants = fit([step for step in steps if step.model.name != size])
        logs = np.array([step.log_error(constants) for step in left])
        seconds = np.array([step.seconds for step in left])
        predicted = np.exp(logs) * seconds
        sizes.append(
            LeftOut(
                size=size,
                gpus=left[0].layout.gpus,
                steps=len(left),
                error=float(np.abs(np.expm1(logs)).mean()),
                picked=float(seconds[predicted.argmin()] / seconds.min()),
                logs=logs.tolist(),
            )
        )
    return sizes


def mean_error(sizes: Sequence[LeftOut]) -> float:
    """Mean of |predicted / measured - 1| over all steps."""
    return sum(size.error * size.steps for size in sizes) / sum(size.steps for size in sizes)


def interval_factor(sizes: Sequence[LeftOut]) -> float:
    """The factor within which COVERAGE of the left-out predictions lie: FACTOR."""
    logs = np.concatenate([size.logs for size in sizes])
    return float(np.exp(np.quantile(np.abs(logs), COVERAGE)))


def coverage() -> float:
    """The share of steps inside an interval whose factor was found without their model size, as were the constants.

    For each size the factor comes from the other sizes alone, each predicted by a fit that saw neither.
    """
    inside = 0
    for size in left_out():
        seen = [step for step in measured() if step.model.name != size.size]
        limit = np.log(interval_factor(left_out(seen)))
        inside += sum(abs(log) <= limit for log in size.logs)
    return inside / len(measured())
