"""Chapter 4's figures: what DDP is, and when a step computes and when it waits."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from matplotlib.ticker import MaxNLocator

from helpers.figures.drawing import INK, Span, boxes, canvas, rank_color, style

# --- one step of DDP, as a model --------------------------------------------------------------------------------------


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

    Returns spans in milliseconds. Their lane is "compute" or "network", their label "forward", "backward",
    "all-reduce", "wait" (the communication that nothing hides) or "step". Raises ValueError for no rank or no bucket.
    """
    if world_size < 1 or buckets < 1:
        raise ValueError(f"overlap_schedule({world_size}, {buckets}): there is at least one rank, and one bucket.")
    sent_share = 2 * (world_size - 1) / world_size
    all_reduce = latency + sent_share * (megabytes / buckets) / gigabytes_per_second  # MB / (GB/s) = ms
    schedule = [Span("compute", 0, forward, "forward")]
    network_is_free: float = 0  # at this time
    for bucket in range(buckets):
        start = forward + backward * bucket / buckets
        gradients_are_ready = forward + backward * (bucket + 1) / buckets
        schedule.append(Span("compute", start, gradients_are_ready, "backward"))
        if world_size > 1:
            start = max(gradients_are_ready, network_is_free)
            network_is_free = start + all_reduce
            schedule.append(Span("network", start, network_is_free, "all-reduce"))
    end = forward + backward
    if network_is_free > end:
        schedule.append(Span("compute", end, network_is_free, "wait"))
        end = network_is_free
    schedule.append(Span("compute", end, end + step, "step"))
    return schedule


def exposed(schedule: Sequence[Span]) -> float:
    """The milliseconds in an ``overlap_schedule`` in which a rank only waits for the network."""
    return sum(span.end - span.start for span in schedule if span.label == "wait")


# --- its figure -------------------------------------------------------------------------------------------------------

LEFT = 70  # pixels of the timeline's sides
RIGHT = 650
TOP = 56
BOTTOM = 268
ROW = 21  # height of a row of the bar chart below the timeline
PARTS = {  # label of a span: its name in the legend
    "forward": "forward",
    "backward": "backward",
    "all-reduce": "all-reduce",
    "wait": "waiting",
    "step": "optimizer step",
}


@style()
def ddp_overlap(world_size: int = 4, buckets: int = 4, gigabytes_per_second: float = 10, **model: float) -> Figure:
    """A Figure: a timeline of one DDP step on every rank, and how long it waits with each number of buckets.

    All but the first two go to ``overlap_schedule``, whose docstring has the assumptions. The time axis is the same for
    any ``world_size`` and ``buckets``, so that a reader can compare frames.
    """
    model["gigabytes_per_second"] = gigabytes_per_second
    counts = sorted({1, 2, 4, 8, 16, buckets})
    # No number of ranks takes longer than very many.
    axis_end = max(overlap_schedule(10**6, count, **model)[-1].end for count in counts)
    pixels_per_ms = (RIGHT - LEFT) / axis_end
    schedule = overlap_schedule(world_size, buckets, **model)
    waits = {count: exposed(overlap_schedule(world_size, count, **model)) for count in counts}

    fig, ax = canvas(660, 324 + ROW * len(counts))
    draw_legend(ax)
    draw_phases(ax, schedule, pixels_per_ms)
    for rank in range(world_size):
        draw_rank(ax, rank, world_size, schedule, pixels_per_ms)
    draw_time_axis(ax, axis_end, pixels_per_ms)
    draw_waits(ax, waits, buckets, pixels_per_ms)
    return fig


def look_of(label: str, color: str) -> dict[str, Any]:
    """How the spans of a label are filled and outlined."""
    if label == "all-reduce":
        return {"facecolor": color}
    outline = {"edgecolor": color, "linewidth": 0.8}
    if label == "forward":
        return {"facecolor": (color, 0.18), **outline}
    if label == "backward":
        return {"facecolor": (color, 0.45), **outline}
    if label == "wait":
        return {"facecolor": "none", "hatch": "////", **outline}
    return {"facecolor": "none", **outline}


def draw_legend(ax: Axes) -> None:
    """The legend is in ink, because every rank has its own colour."""
    x: float = LEFT
    for label, name in PARTS.items():
        boxes(ax, [(x, 6, 16, 13)], **look_of(label, INK))
        ax.text(x + 22, 17, name)
        x += 42 + 7.5 * len(name)


def draw_phases(ax: Axes, schedule: Sequence[Span], pixels_per_ms: float) -> None:
    """Lines across all ranks where forward, backward, the wait and the optimizer's step begin and end."""
    edges = set()
    for label in ("forward", "backward", "wait", "step"):
        spans = [span for span in schedule if span.label == label]
        if spans:
            edges |= {spans[0].start, spans[-1].end}
        if spans and label == "wait":
            x = min(LEFT + spans[0].start * pixels_per_ms, RIGHT - 112)
            ax.text(x, TOP - 8, f"waiting {exposed(schedule):.1f} ms", weight="bold")
    lines = [(LEFT + ms * pixels_per_ms - 0.4, TOP, 0.8, BOTTOM - TOP) for ms in sorted(edges)]
    boxes(ax, lines, facecolor=(INK, 0.3))


def draw_rank(ax: Axes, rank: int, world_size: int, schedule: Sequence[Span], pixels_per_ms: float) -> None:
    """What a rank computes, and below it its all-reduces."""
    pitch = min((BOTTOM - TOP) / world_size, 74)
    y = (TOP + BOTTOM) / 2 + (rank - world_size / 2 + 0.08) * pitch
    ax.text(LEFT - 10, y + pitch / 4 + 5, f"rank {rank}", ha="right", fontsize=min(13, 5 + pitch / 3))
    labels = dict.fromkeys(span.label for span in schedule)
    for label in labels:
        lane_y = y
        height = 0.5 * pitch
        if label == "all-reduce":
            lane_y = y + 0.54 * pitch
            height = 0.3 * pitch
        rectangles = []
        for span in schedule:
            if span.label == label:
                start = LEFT + span.start * pixels_per_ms
                width = LEFT + span.end * pixels_per_ms - start
                rectangles.append((start, lane_y, max(width - 1.2, 0.6), height))  # a gap parts it from the next
        boxes(ax, rectangles, **look_of(label, rank_color(rank)))
    if world_size == 1:
        ax.text(LEFT, y + 0.8 * pitch, "one rank: nothing to average, nothing to send")


def draw_time_axis(ax: Axes, axis_end: float, pixels_per_ms: float) -> None:
    ticks = [int(ms) for ms in MaxNLocator(6, integer=True).tick_values(0, axis_end) if ms <= axis_end]
    rectangles: list[tuple[float, float, float, float]] = [(LEFT, BOTTOM + 6, RIGHT - LEFT, 1)]
    for ms in ticks:
        rectangles.append((LEFT + ms * pixels_per_ms - 0.5, BOTTOM + 6, 1, 5))
    boxes(ax, rectangles, facecolor=INK)
    for ms in ticks:
        if ms == 0:
            ax.text(LEFT, BOTTOM + 25, "0 ms", ha="left")
        else:
            ax.text(LEFT + ms * pixels_per_ms, BOTTOM + 25, f"{ms}", ha="center")


def draw_waits(ax: Axes, waits: dict[int, float], buckets: int, pixels_per_ms: float) -> None:
    """A bar chart of ``waits``, {number of buckets: milliseconds}, in which the shown number stands out."""
    ax.text(LEFT, BOTTOM + 47, "waiting, by number of buckets")
    y = BOTTOM + 54
    for count, wait in waits.items():
        weight = "normal"
        opacity = 0.3
        if count == buckets:
            weight = "bold"
            opacity = 1
        length = wait * pixels_per_ms
        boxes(ax, [(LEFT, y + 3, length, 13)], facecolor=(INK, opacity))
        ax.text(LEFT - 10, y + 14, f"{count}", ha="right", weight=weight)
        ax.text(LEFT + length + 6, y + 14, f"{wait:.1f} ms", weight=weight)
        y += ROW


# --- the other figures ------------------------------------------------------------------------------------------------


@style()
def replicas(world_size: int = 4) -> Figure:
    """A Figure of DDP's idea: each rank has a shard and a gradient, in its colour, and the same model, in ink."""
    fig, ax = canvas(660, 352)
    left = 128
    right = 650
    gap = 14
    width = min((right - left + gap) / world_size - gap, 180)
    first = (left + right + gap - (width + gap) * world_size) / 2

    ax.text(0, 47, "its shard")
    ax.text(0, 67, "of the batch")
    ax.text(0, 129, "its replica")
    ax.text(0, 149, "of the model")
    ax.text(0, 219, "its gradient")
    ax.text(0, 278, "all-reduce")
    ax.text(0, 332, "the same step")

    shared: dict[str, Any] = {"facecolor": (INK, 0.1), "edgecolor": INK, "linewidth": 1}
    for rank in range(world_size):
        x = first + rank * (width + gap)
        center = x + width / 2
        color = rank_color(rank)
        name = f"{rank}"
        if width > 48:
            name = f"rank {rank}"
        ax.text(center, 18, name, ha="center", weight="bold")
        private: dict[str, Any] = {"facecolor": (color, 0.4), "edgecolor": color}
        boxes(ax, [(x, 32 + 14 * row, width, 11) for row in range(3)], **private, linewidth=1)
        arrow_down(ax, center, 76, 98)
        layers = []
        for y, share in [(102, 1), (124, 0.8), (146, 0.6)]:
            layers.append((center - share * width / 2, y, share * width, 17))
        boxes(ax, layers, **shared)
        arrow_down(ax, center, 168, 196)
        boxes(ax, [(x, 200, width, 28)], **private, linewidth=1)
        arrow_down(ax, center, 231, 255)
        arrow_down(ax, center, 290, 311)
        boxes(ax, [(x, 314, width, 28)], **shared)
        if width > 105:
            ax.text(center, 333, "equal weights", ha="center")

    edge = min(first, 256)  # so that the bar of the all-reduce is wide enough for its words
    boxes(ax, [(edge, 258, left + right - 2 * edge, 30)], **shared)
    text = f"the mean of {world_size} gradients, on every rank"
    if world_size == 1:
        text = "one gradient is its own mean"
    ax.text((left + right) / 2, 278, text, ha="center")
    return fig


def arrow_down(ax: Axes, x: float, start: float, end: float) -> None:
    look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "color": INK, "linewidth": 1}
    ax.add_artist(FancyArrowPatch((x, start), (x, end), shrinkA=0, shrinkB=0, clip_on=False, **look))
