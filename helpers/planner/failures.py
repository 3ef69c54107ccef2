"""How often a job fails, how often it should save, and what share of its time is useful."""

import math

# In mean times between failures. An attempt that takes longer than this ends without a failure once in e^30 times.
LONGEST_ATTEMPT = 30


def mttf_hours(nodes: int, failures_per_node_day: float) -> float:
    """Hours between failures of a job: 24 / (nodes · r_f) (Kokolis et al. 2025, section III)."""
    return 24 / (nodes * failures_per_node_day)


def checkpoint_interval(save_seconds: float, nodes: int, failures_per_node_day: float) -> float:
    """The best number of seconds between checkpoints: √(2δM), for a mean time M between failures much larger than δ.

    Source: Young 1974, equation 6. From a rate of failures for each node it is dt* = √(2w/(N·r)) (Kokolis et al. 2025,
    section II-D).

    save_seconds: how long training stops for a checkpoint, δ or w.
    """
    return math.sqrt(2 * save_seconds * 3600 * mttf_hours(nodes, failures_per_node_day))


def goodput(
    nodes: int, failures_per_node_day: float, restart_seconds: float, interval_seconds: float, save_seconds: float
) -> float:
    """The expected share of the time in which the job makes progress that it keeps (ETTR), in 0..1.

    It is τ / (M · e^(R/M) · (e^((τ+δ)/M) - 1)) for a mean time M between failures, a restart R, and a save of δ after
    each interval τ (Daly 2006). Failures may also happen during a restart or a save. Chapter 13 compares this formula
    with a simulation. The first-order formula, (1 - (R + τ/2)/M) / (1 + δ/τ) (Kokolis et al. 2025), agrees with it if
    R + τ/2 is much shorter than M.
    """
    mean_seconds = 3600 * mttf_hours(nodes, failures_per_node_day)
    if restart_seconds + interval_seconds + save_seconds > LONGEST_ATTEMPT * mean_seconds:
        return 0.0  # Hardly any attempt would end without a failure.
    growth = math.exp(restart_seconds / mean_seconds) * math.expm1((interval_seconds + save_seconds) / mean_seconds)
    return interval_seconds / (mean_seconds * growth)
