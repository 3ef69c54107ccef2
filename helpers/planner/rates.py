"""Between seconds, FLOP/s and shares of a peak: MFU, HFU, days, the bubble, cost."""

from helpers.planner.model import PlanError


def tokens_per_step(model, layout):
    return layout.batch * model.seq


def achieved(model, tokens_per_second, gpus, count="6N+A", recompute="none"):
    """FLOP/s of each GPU: model FLOPs, or hardware FLOPs where what is recomputed is counted, too."""
    return model.flops_per_token(count, recompute) * tokens_per_second / gpus


def utilization(model, tokens_per_second, gpus, peak, count="6N+A", recompute="none"):
    """(MFU, HFU) in 0..1: model FLOPs (Chowdhery et al. 2022, appendix B) and, with what is recomputed, hardware FLOPs
    (Korthikanti et al. 2022, section 6.3) as shares of the peak."""
    mfu = achieved(model, tokens_per_second, gpus, count) / peak
    return mfu, achieved(model, tokens_per_second, gpus, count, recompute) / peak


def bubble(stages, micro_batches, interleave=1, relative_to="ideal"):
    """The pipeline's idle time: (p-1)/(v·m) of the ideal time (Narayanan et al. 2021, section 2.2), or as a share of
    the total time, (p-1)/(v·m + p-1)."""
    if relative_to not in ("ideal", "total"):
        raise PlanError(f"a bubble relative to {relative_to!r} is not known.\nGive ideal or total.")
    work = interleave * micro_batches
    return (stages - 1) / (work + (stages - 1 if relative_to == "total" else 0))


def training_days(model, tokens, gpus, flops_per_gpu, days="count", count="gemm", recompute="none"):
    """Days to train on so many tokens at so many FLOP/s a GPU.

    "8TP": 8TP/(nX), 6TP/(nX) without recomputation (Narayanan et al. 2021, equation 4); "count": from the count of
    FLOPs for each token. The FLOP/s must count the same FLOPs: with recomputation where recompute says so.
    """
    if days == "8TP":
        each = (8 if recompute == "full" else 6) * model.parameters()
    else:
        each = model.flops_per_token(count, recompute)
    return each * tokens / (gpus * flops_per_gpu) / 86400


def cost(gpus, hours, price_per_gpu_hour):
    """In the price's currency."""
    return gpus * hours * price_per_gpu_hour
