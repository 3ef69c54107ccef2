"""How often a job fails, how often it should save, and what is left of its time. Seconds unless a name says hours."""

import math


def mttf_hours(nodes: int, failures_per_node_day: float) -> float:
    """Hours between failures of a job: 24 / (nodes · r_f) (Kokolis et al. 2025, section III)."""
    return 24 / (nodes * failures_per_node_day)


def poisson_interval(count: int, coverage: float = 0.95) -> tuple[float, float]:
    """(lowest, highest) mean that a count of independent failures agrees with: exact, by the gamma distribution.

    Garwood 1936. A rate from 3 failures is uncertain fourfold, from 300 by a tenth.
    """
    from scipy.special import gammaincinv  # scikit-learn brings SciPy; imported here as it takes a moment

    tail = (1 - coverage) / 2
    return (float(gammaincinv(count, tail)) if count else 0.0), float(gammaincinv(count + 1, 1 - tail))


def poisson_counts(mean: float, coverage: float = 0.95) -> tuple[int, int]:
    """(lowest, highest) count that happens with this coverage where so many failures are expected."""
    from scipy.special import ndtri, pdtrik

    tail = (1 - coverage) / 2
    if mean > 1e9:  # a normal distribution, as good there; pdtrik finds nothing for the largest means
        low, high = (math.ceil(mean + float(ndtri(share)) * math.sqrt(mean)) for share in (tail, 1 - tail))
    else:
        low, high = (max(math.ceil(float(pdtrik(share, mean))), 0) for share in (tail, 1 - tail))
    return low, high


def checkpoint_interval(save: float, nodes: int, failures_per_node_day: float) -> float:
    """Seconds between checkpoints that lose least: √(2δM), for a mean time M between failures much larger than δ.

    Young 1974, equation 6; dt* = √(2w/(N·r)) from a rate for each node (Kokolis et al. 2025, section II-D).
    """
    return math.sqrt(2 * save * 3600 * mttf_hours(nodes, failures_per_node_day))


def goodput(nodes: int, failures_per_node_day: float, restart: float, interval: float, save: float) -> float:
    """Expected share of the time in which the job makes progress that it keeps (ETTR).

    (1 - N·r·(u₀ + dt/2)) / (1 + w/dt) (Kokolis et al. 2025, equation for E[ETTR]): each failure costs the restart and,
    on average, half of an interval; each interval is longer by what a save takes. 0 where nothing is left.
    """
    rate = nodes * failures_per_node_day / 86400
    return max(0.0, 1 - rate * (restart + interval / 2)) / (1 + save / interval)
