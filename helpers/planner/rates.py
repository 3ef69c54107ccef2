"""Between seconds, FLOP/s and shares of a time: MFU, HFU, the bubble."""

from helpers.planner.model import Model


def achieved(model: Model, tokens_per_second: float, gpus: int, count: str = "6N+A", recompute: str = "none") -> float:
    """FLOP/s of each GPU: model FLOPs, or hardware FLOPs where what is recomputed is counted, too.

    As a share of the peak the one is MFU (Chowdhery et al. 2022, appendix B), the other HFU (Korthikanti et al. 2022,
    section 6.3).
    """
    return model.flops_per_token(count, recompute) * tokens_per_second / gpus


def bubble(stages: int, micro_batches: int, interleave: int = 1) -> float:
    """The pipeline's idle time as a share of the ideal time, in which no stage waits.

    (p-1)/(v·m), with p stages, m micro-batches and v parts of the model on each stage (Narayanan et al. 2021,
    section 2.2).
    """
    return (stages - 1) / (interleave * micro_batches)
