"""Factors for GPUs, programs and features that vTrain did not measure: for time and for memory, and an interval.

experiments/steps.py fits them on half of the published steps of book/recorded/steps.csv, and a test compares the
numbers here with a new fit.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Corrections:
    """Factors that correct the counted times. 1 is for no difference."""

    h100: float  # the share of the peak that matrix products reach on an H100, divided by an A100's
    engine: float  # the share that Transformer Engine's products reach on an H100, divided by that of PyTorch's
    float8: float  # the share of the peak that products of float8 reach, divided by that of bfloat16
    experts: float  # the share that the products of many experts reach, divided by that of one matrix
    eager: float  # memory traffic of elementwise operations in kernels of their own, divided by that in fused ones
    parts: float  # the share that PyTorch's context_parallel reaches in attention, divided by that of one kernel
    exposed: float  # the share of tensor parallelism's time that is left where it overlaps with products


# What steps.fit gives, rounded.
CORRECTIONS = Corrections(h100=0.668, engine=1.17, float8=0.955, experts=0.662, eager=3.08, parts=0.685, exposed=0.5)
# 90 % of the fitted steps, each left out of the fit in turn, took between prediction / 1.214 and prediction · 1.214
# seconds (steps.interval_factor).
EXTRAPOLATION_FACTOR = 1.214
# What PyTorch's allocator reserves beyond the bytes of tensors, as a share of these: freed pieces that are too small
# for the next tensor (steps.allocator_gaps).
ALLOCATOR_GAPS = 0.131
