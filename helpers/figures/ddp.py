"""Chapter 4's figures: a picture of what DDP is, and one of when a step computes and when it waits."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from matplotlib.ticker import MaxNLocator

from helpers.figures.drawing import INK, Span, boxes, canvas, rank_color, rank_hatch, style


def overlap_schedule(
    world_size: int,
    buckets: int,
    *,
    megabytes: float = 100,
    forward: float = 10,
    backward: float = 20,
    step: float = 3,
    latency: float = 1,
    gigabytes_per_second: float = 10,
) -> list[Span]:
    """When each part of one DDP training step runs, on any of the ranks: all do the same at the same time.

    A model, not a measurement. It assumes ``buckets`` buckets of ``megabytes / buckets`` each; backward time spread
    evenly over them, the last layers' bucket first; one all-reduce at a time, in the buckets' order, that does not
    slow the computation; and for the all-reduce of n bytes on N ranks ``latency + 2 (N - 1) / N * n / bandwidth``, a
    ring's cost (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009),
    nothing when N is 1. ``forward``, ``backward``, ``step`` (the optimizer's) and ``latency`` are in milliseconds.

    Returns a list of (lane, start, end, label), times in milliseconds; lane is "compute" or "network", label
    "forward", "backward", "all-reduce", "wait" (the communication that nothing hides) or "step".
    """
    if world_size < 1 or buckets < 1:
        raise ValueError(f"overlap_schedule({world_size}, {buckets}): there is at least one rank, and one bucket.")
    share = 2 * (world_size - 1) / world_size
    all_reduce = latency + share * (megabytes / buckets) / gigabytes_per_second  # MB / (GB/s) = ms
    schedule: list[Span] = [("compute", 0, forward, "forward")]
    free: float = 0  # the time at which the network is free again
    for bucket in range(buckets):
        start, ready = (forward + backward * done / buckets for done in (bucket, bucket + 1))
        schedule.append(("compute", start, ready, "backward"))
        if world_size > 1:
            begin = max(ready, free)
            free = begin + all_reduce
            schedule.append(("network", begin, free, "all-reduce"))
    end = forward + backward
    if free > end:
        schedule.append(("compute", end, free, "wait"))
        end = free
    schedule.append(("compute", end, end + step, "step"))
    return schedule


def exposed(schedule: Sequence[Span]) -> float:
    """The milliseconds in an ``overlap_schedule`` in which a rank only waits for the network."""
    return sum(end - start for _, start, end, label in schedule if label == "wait")


@style()
def ddp_overlap(world_size: int = 4, buckets: int = 4, gigabytes_per_second: float = 10, **model: float) -> Figure:
    """A Figure: a timeline of one DDP step on every rank, and how long it waits with each number of buckets.

    All but the first two go to ``overlap_schedule``, whose docstring has the assumptions. The time axis is the same for
    any ``world_size`` and ``buckets``, so that a reader can compare frames.
    """
    model["gigabytes_per_second"] = gigabytes_per_second
    choices = sorted({1, 2, 4, 8, 16, buckets})
    slowest = max(end for n in choices for _, _, end, _ in overlap_schedule(10**6, n, **model))
    schedule = overlap_schedule(world_size, buckets, **model)
    left, right, top, bottom = 70, 650, 56, 268
    fig, ax = canvas(660, 324 + 21 * len(choices))

    def at(ms: float) -> float:
        return left + (right - left) * ms / slowest

    def spaced(y: float, height: float, label: str) -> list[tuple[float, float, float, float]]:
        edges = [(at(start), at(end)) for _, start, end, name in schedule if name == label]
        return [(start, y, max(end - start - 1.2, 0.6), height) for start, end in edges]

    def look(label: str, color: str) -> dict[str, Any]:
        faces = {"forward": (color, 0.18), "backward": (color, 0.45), "all-reduce": color}
        edge = {} if label == "all-reduce" else {"edgecolor": color, "linewidth": 0.8}
        return {"facecolor": faces.get(label, "none"), "hatch": "////" if label == "wait" else None, **edge}

    # A legend in ink: every rank has its own colour.
    x: float = left
    words = {"wait": "waiting", "step": "optimizer step"}
    for label in ["forward", "backward", "all-reduce", "wait", "step"]:
        text = words.get(label, label)
        boxes(ax, [(x, 6, 16, 13)], **look(label, INK))
        ax.text(x + 22, 17, text)
        x += 42 + 7.5 * len(text)

    spans: dict[str, list[float]] = {}
    for _, start, end, label in schedule:
        spans.setdefault(label, [start, end])[1] = end
    if "wait" in spans:
        start, end = spans["wait"]
        ax.text(min(at(start), right - 112), top - 8, f"waiting {end - start:.1f} ms", weight="bold")
    edges = sorted({ms for label, span in spans.items() if label != "all-reduce" for ms in span})
    boxes(ax, [(at(ms) - 0.4, top, 0.8, bottom - top) for ms in edges], facecolor=(INK, 0.3))

    pitch = min((bottom - top) / world_size, 74)
    for rank in range(world_size):
        y = (top + bottom) / 2 + (rank - world_size / 2 + 0.08) * pitch
        ax.text(left - 10, y + pitch / 4 + 5, f"rank {rank}", ha="right", fontsize=min(13, 5 + pitch / 3))
        for label in spans:
            lane = (y + 0.54 * pitch, 0.3 * pitch) if label == "all-reduce" else (y, 0.5 * pitch)
            boxes(ax, spaced(*lane, label), **look(label, rank_color(rank)))
        if world_size == 1:
            ax.text(at(0), y + 0.8 * pitch, "one rank: nothing to average, nothing to send")

    ticks = [int(ms) for ms in MaxNLocator(6, integer=True).tick_values(0, slowest) if ms <= slowest]
    axis = (left, bottom + 6, right - left, 1)
    boxes(ax, [axis, *[(at(ms) - 0.5, bottom + 6, 1, 5) for ms in ticks]], facecolor=INK)
    for ms in ticks:
        ax.text(at(ms), bottom + 25, f"{ms}" if ms else "0 ms", ha="center" if ms else "left")

    ax.text(left, bottom + 47, "waiting, by number of buckets")
    for row, n in enumerate(choices):
        wait = exposed(overlap_schedule(world_size, n, **model))
        y, here = bottom + 54 + 21 * row, n == buckets
        weight = "bold" if here else "normal"
        boxes(ax, [(left, y + 3, at(wait) - left, 13)], facecolor=(INK, 1 if here else 0.3))
        ax.text(left - 10, y + 14, f"{n}", ha="right", weight=weight)
        ax.text(at(wait) + 6, y + 14, f"{wait:.1f} ms", weight=weight)
    return fig


@style()
def replicas(world_size: int = 4) -> Figure:
    """A Figure of DDP's idea: each rank has a shard and a gradient, in its colour, and the same model, in ink."""
    fig, ax = canvas(660, 352)
    left, right, gap = 128, 650, 14
    width = min((right - left + gap) / world_size - gap, 180)
    first = (left + right + gap - (width + gap) * world_size) / 2

    def arrow(x: float, start: float, end: float) -> None:
        look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "color": INK, "linewidth": 1}
        ax.add_artist(FancyArrowPatch((x, start), (x, end), shrinkA=0, shrinkB=0, clip_on=False, **look))

    for y, text in [
        (47, "its shard"), (67, "of the batch"), (129, "its replica"), (149, "of the model"),
        (219, "its gradient"), (278, "all-reduce"), (332, "the same step"),
    ]:  # fmt: skip
        ax.text(0, y, text)
    same: dict[str, Any] = {"facecolor": (INK, 0.1), "edgecolor": INK, "linewidth": 1}
    for rank in range(world_size):
        x = first + rank * (width + gap)
        color = rank_color(rank)
        own: dict[str, Any] = {"facecolor": (color, 0.4), "edgecolor": color, "hatch": rank_hatch(rank)}
        middle = x + width / 2
        ax.text(middle, 18, f"rank {rank}" if width > 48 else f"{rank}", ha="center", weight="bold")
        boxes(ax, [(x, 32 + 14 * row, width, 11) for row in range(3)], **own, linewidth=1)
        arrow(middle, 76, 98)
        layers = [(102 + 22 * row, share * width) for row, share in enumerate([1, 0.8, 0.6])]
        boxes(ax, [(middle - wide / 2, y, wide, 17) for y, wide in layers], **same)
        arrow(middle, 168, 196)
        boxes(ax, [(x, 200, width, 28)], **own, linewidth=1)
        arrow(middle, 231, 255)
        arrow(middle, 290, 311)
        boxes(ax, [(x, 314, width, 28)], **same)
        if width > 105:
            ax.text(middle, 333, "equal weights", ha="center")
    edge = min(first, 256)  # here the bar is wide enough for its words
    boxes(ax, [(edge, 258, left + right - 2 * edge, 30)], **same)
    text = f"the mean of {world_size} gradients, on every rank" if world_size > 1 else "one gradient is its own mean"
    ax.text((left + right) / 2, 278, text, ha="center")
    return fig


@style()
def bucket_map(buckets: Sequence[Sequence[tuple[str, int]]]) -> Figure:
    """DDP's buckets, the first to leave on top: lists of (parameter's name, bytes). A box is as wide as its bytes."""
    left, width, gap, pitch = 92, 560, 4, 38
    largest = max(sum(size for _, size in bucket) for bucket in buckets)
    fig, ax = canvas(left + width + 8, pitch * len(buckets) + 10)
    for row, bucket in enumerate(buckets):
        x: float = left
        y = 6 + pitch * row
        total = sum(size for _, size in bucket)
        ax.text(0, y + 13, f"bucket {row}")
        ax.text(0, y + 28, f"{total / 2**20:.2f} MiB", color=(INK, 0.7), fontsize=11)
        for name, size in bucket:
            long = max(6, (width - gap * len(bucket)) * size / largest)
            boxes(ax, [(x, y, long, 28)], facecolor=(INK, 0.18), edgecolor=INK, linewidth=1)
            if long > 60:
                ax.text(x + long / 2, y + 19, name, ha="center")
            x += long + gap
    return fig
