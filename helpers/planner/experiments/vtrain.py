"""88 measured steps (vTrain, Bang et al. 2024), each predicted by a fit that did not see its model size.

They are in book/recorded/vtrain.csv. Chapter 15 shows the errors; step_time.py holds what a fit on all of them gives.
"""

import csv
import functools
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from helpers.planner.cluster import PRESETS, Cluster
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.model import Model, model_of
from helpers.planner.step_time import COVERAGE, Constants, parts_of

MEASURED = Path(__file__).parents[3] / "book" / "recorded" / "vtrain.csv"
MEGATRON = Conventions(states="zero")  # gradients are summed in 16 bits
# Where the fit starts, and what pulls it back: the standard deviation of each constant's logarithm. in_node was
# measured: 234.89 GB/s of 300, an all-reduce of 16 GiB on 8 A100s. The others are wide.
PRIOR = Constants(matmul=0.75, memory=0.8, in_node=0.78, between=0.75, launch=0.001)
WIDTH = Constants(matmul=0.15, memory=0.15, in_node=0.05, between=0.25, launch=1.0)
NOISE = 0.08  # of a measured step, as a share; beyond it a step counts less, so that an outlier does not lead


@dataclass(frozen=True)
class Step:
    """A step that was measured."""

    model: Model
    layout: Layout
    cluster: Cluster
    seconds: float

    @functools.cached_property
    def parts(self) -> Callable[[Constants], dict[str, float]]:
        """Its work, counted once for all fits."""
        return parts_of(self.model, self.layout, self.cluster, MEGATRON)


@functools.cache
def measured() -> tuple[Step, ...]:
    """vTrain's file: GPTs of Megatron-LM in float16, with full recomputation, on nodes of 8 A100s with NVLink.

    The network is not in the file: a 100 Gb/s share for each GPU is assumed.
    """
    steps = []
    rows = csv.reader(line for line in MEASURED.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    next(rows)
    for billions, *sizes, milliseconds in rows:
        gpus, batch, micro_batch, width, heads, layers, seq, tp, dp, pp = map(int, sizes)
        shape = {"layers": layers, "width": width, "heads": heads, "seq": seq}
        model = model_of({"preset": "gpt-175b", "name": f"{billions}B", **shape})
        layout = Layout(
            dp, tp, pp, micro_batch=micro_batch, batch=batch, recompute="full", attention="scores", dtype="float16"
        )
        cluster = Cluster(**{**PRESETS["a100"], "nodes": gpus // 8, "link_between": 12.5e9})
        steps.append(Step(model, layout.check(model), cluster, float(milliseconds) / 1000))
    return tuple(steps)


def log_errors(steps: Sequence[Step], constants: Constants) -> np.ndarray:
    """log(predicted / measured) of each step: [steps]."""
    return np.log([sum(step.parts(constants).values()) / step.seconds for step in steps])


def fit(steps: Sequence[Step]) -> Constants:
    """The Constants that fit measured steps: least squares of log(predicted / measured), pulled to PRIOR.

    On the constants' logarithms. A step that is off by much more than NOISE counts by its distance, not its square
    (pseudo-Huber). Deterministic.
    """
    start, width = np.log(astuple(PRIOR)), np.array(astuple(WIDTH))

    def residuals(logs: np.ndarray) -> np.ndarray:
        off = log_errors(steps, Constants(*np.exp(logs))) / NOISE
        robust = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))
        return np.concatenate([robust, (logs - start) / width])

    logs = least_squares(residuals, start, xtol=1e-12, ftol=1e-14).x
    return Constants(*(float(value) for value in np.exp(logs)))


@dataclass(frozen=True)
class LeftOut:
    """A model size whose steps were predicted by a fit on the other sizes."""

    size: str
    gpus: int
    steps: int
    error: float  # mean of |predicted / measured - 1|
    bias: float  # mean of predicted / measured - 1
    picked: float  # seconds of the layout that is predicted to be fastest, beside the fastest measured: 1 is best
    logs: tuple[float, ...]  # log(predicted / measured)


def left_out(steps: Sequence[Step] = ()) -> list[LeftOut]:
    """Each model size, left out. In vTrain's file each size has one number of GPUs: they are left out together."""
    steps, sizes = steps or measured(), []
    for size in dict.fromkeys(step.model.name for step in steps):
        here = [step for step in steps if step.model.name == size]
        logs = log_errors(here, fit([step for step in steps if step.model.name != size]))
        times, off = np.array([step.seconds for step in here]), np.expm1(logs)
        picked = float(times[np.argmin(np.exp(logs) * times)] / times.min())
        error, bias = float(abs(off).mean()), float(off.mean())
        sizes.append(LeftOut(size, here[0].layout.gpus, len(here), error, bias, picked, tuple(logs.tolist())))
    return sizes


def mean_error(sizes: Sequence[LeftOut]) -> float:
    """Mean of |predicted / measured - 1| over all steps."""
    return sum(size.error * size.steps for size in sizes) / sum(size.steps for size in sizes)


def interval_factor(sizes: Sequence[LeftOut]) -> float:
    """The factor within which COVERAGE of the left-out predictions lie: FACTOR."""
    return float(np.exp(np.quantile(np.abs(np.concatenate([size.logs for size in sizes])), COVERAGE)))


def coverage() -> float:
    """The share of steps inside an interval whose factor was found without their model size, as were the constants.

    For each size the factor comes from the others alone, each predicted by a fit that saw neither.
    """
    inside = 0
    for size in left_out():
        factor = interval_factor(left_out([step for step in measured() if step.model.name != size.size]))
        inside += sum(abs(log) <= np.log(factor) for log in size.logs)
    return inside / len(measured())
