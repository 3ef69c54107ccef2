"""Rates of a step: FLOP/s, from which MFU and HFU follow, and the pipeline's bubble."""

from helpers.planner.model import Model


def achieved(model: Model, tokens_per_second: float, gpus: int, count: str = "6N+A", recompute: str = "none") -> float:
    """FLOP/s that each GPU reaches.

    With recompute = "none" these are model FLOPs. Divided by the peak they are the MFU (Chowdhery et al. 2022,
    appendix B).
    Otherwise what is recomputed counts, too, and divided by the peak they are the HFU (Korthikanti et al. 2022,
    section 6.3).
    """
    return model.flops_per_token(count, recompute) * tokens_per_second / gpus


def bubble(stages: int, micro_batches: int, interleave: int = 1) -> float:
    """The pipeline's idle time as a share of the ideal time, in which no stage waits.

    It is (p-1)/(v·m), with p stages, m micro-batches and v parts of the model on each stage (Narayanan et al. 2021,
    section 2.2).
    """
    return (stages - 1) / (interleave * micro_batches)
