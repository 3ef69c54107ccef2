"""Between seconds, FLOP/s and shares of a peak: MFU, HFU, days, the bubble, cost."""

from helpers.planner.layout import Layout
from helpers.planner.model import Model
from helpers.planner.records import PlanError


def tokens_per_step(model: Model, layout: Layout) -> int:
    return layout.batch * model.seq


def achieved(model: Model, tokens_per_second: float, gpus: int, count: str = "6N+A", recompute: str = "none") -> float:
    """FLOP/s of each GPU: model FLOPs, or hardware FLOPs where what is recomputed is counted, too."""
    return model.flops_per_token(count, recompute) * tokens_per_second / gpus


def utilization(
    model: Model, tokens_per_second: float, gpus: int, peak: float, count: str = "6N+A", recompute: str = "none"
) -> tuple[float, float]:
    """(MFU, HFU) in 0..1: model FLOPs (Chowdhery et al. 2022, appendix B) and, with what is recomputed, hardware FLOPs
    (Korthikanti et al. 2022, section 6.3) as shares of the peak."""
    mfu = achieved(model, tokens_per_second, gpus, count) / peak
    return mfu, achieved(model, tokens_per_second, gpus, count, recompute) / peak


def bubble(stages: int, micro_batches: int, interleave: int = 1, relative_to: str = "ideal") -> float:
    """The pipeline's idle time: (p-1)/(v·m) of the ideal time (Narayanan et al. 2021, section 2.2), or as a share of
    the total time, (p-1)/(v·m + p-1)."""
    if relative_to not in ("ideal", "total"):
        raise PlanError(f"a bubble relative to {relative_to!r} is not known.\nGive ideal or total.")
    work = interleave * micro_batches
    return (stages - 1) / (work + (stages - 1 if relative_to == "total" else 0))


def training_days(
    model: Model,
    tokens: float,
    gpus: int,
    flops_per_gpu: float,
    days: str = "count",
    count: str = "gemm",
    recompute: str = "none",
) -> float:
    """Days to train on so many tokens at so many FLOP/s a GPU.

    "8TP": 8TP/(nX), 6TP/(nX) without recomputation (Narayanan et al. 2021, equation 4); "count": from the count of
    FLOPs for each token. The FLOP/s must count the same FLOPs: with recomputation where recompute says so.
    """
    if days == "8TP":
        flops: float = (8 if recompute == "full" else 6) * model.parameters()
    else:
        flops = model.flops_per_token(count, recompute)
    return flops * tokens / (gpus * flops_per_gpu) / 86400


def cost(gpus: int, hours: float, price_per_gpu_hour: float) -> float:
    """In the price's currency."""
    return gpus * hours * price_per_gpu_hour
