"""Chapter 4's figures: what DDP is, and when a step computes and when it waits."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from matplotlib.ticker import MaxNLocator

from helpers.figures.drawing import INK, Rectangle, Span, boxes, canvas, rank_color, style

# --- one step of DDP, as a model --------------------------------------------------------------------------------------

FORWARD = 10  # milliseconds, as are the other times
BACKWARD = 20
OPTIMIZER_STEP = 3
MEGABYTES = 100  # of gradients


def overlap_schedule(
    world_size: int, buckets: int, gigabytes_per_second: float = 10, milliseconds_of_latency: float = 0.05
) -> list[Span]:
    """When each part of one DDP training step runs on a rank; all ranks do the same at the same time.

    A model, not a measurement. It assumes that the gradients are divided into equal buckets, that backward takes as
    long for each of them, the last layers' bucket first, and that there is one all-reduce at a time, in the buckets'
    order, which does not slow the computation down. An all-reduce of n bytes on N ranks takes
    ``latency + 2 (N - 1) / N * n / bandwidth``, which is a ring's cost (Patarasu and Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", 2009).

    Returns spans in milliseconds. Their lane is "compute" or "network", their label "forward", "backward",
    "all-reduce", "wait" (the communication that nothing hides) or "step".
    """
    megabytes_of_bucket = MEGABYTES / buckets
    # In a ring, a rank sends (N - 1) / N of a bucket to add it up, and as much again to spread the sum.
    megabytes_sent = 2 * (world_size - 1) / world_size * megabytes_of_bucket
    milliseconds_to_send = megabytes_sent / gigabytes_per_second  # 1 GB/s is 1 MB/ms
    milliseconds_of_all_reduce = milliseconds_of_latency + milliseconds_to_send
    milliseconds_of_backward = BACKWARD / buckets  # for the gradients of one bucket

    schedule = [Span("compute", 0, FORWARD, "forward")]
    all_reduce_end: float = 0  # of the bucket before
    for bucket in range(buckets):
        backward_start = FORWARD + bucket * milliseconds_of_backward
        backward_end = FORWARD + (bucket + 1) * milliseconds_of_backward
        schedule.append(Span("compute", backward_start, backward_end, "backward"))
        # An all-reduce waits for its bucket's gradients, and for the network, which the bucket before may still use.
        all_reduce_start = max(backward_end, all_reduce_end)
        all_reduce_end = all_reduce_start + milliseconds_of_all_reduce
        schedule.append(Span("network", all_reduce_start, all_reduce_end, "all-reduce"))
    # The last all-reduce begins when backward has ended, and the optimizer's step begins when it has ended.
    schedule.append(Span("compute", FORWARD + BACKWARD, all_reduce_end, "wait"))
    schedule.append(Span("compute", all_reduce_end, all_reduce_end + OPTIMIZER_STEP, "step"))
    return schedule


def exposed(schedule: Sequence[Span]) -> float:
    """The milliseconds in an ``overlap_schedule`` in which a rank only waits for the network."""
    return sum(span.end - span.start for span in schedule if span.label == "wait")


# --- its figure -------------------------------------------------------------------------------------------------------

# All sizes and positions below are in pixels, and y grows downwards.
LEFT = 70  # the timeline's sides
RIGHT = 650
TOP = 56
BOTTOM = 268
MAX_RANK_HEIGHT = 74  # of a rank in the timeline, however few ranks there are
SPAN_GAP = 1.2  # between two spans of a rank
MIN_SPAN_WIDTH = 0.6
ROW = 21  # the height of a row of the bar chart below the timeline
LABEL_GAP = 10  # between a row's name, at its left, and LEFT
BUCKET_COUNTS = [1, 2, 4, 8, 16]  # the rows of the bar chart
PARTS = {  # label of a span: its name in the legend
    "forward": "forward",
    "backward": "backward",
    "all-reduce": "all-reduce",
    "wait": "waiting",
    "step": "optimizer step",
}


@style()
def ddp_overlap(
    world_size: int = 4, buckets: int = 4, gigabytes_per_second: float = 10, milliseconds_of_latency: float = 0.05
) -> Figure:
    """A Figure of one DDP step: a timeline of every rank, and below it a bar for the wait with each number of buckets.

    The time axis is the same for any ``world_size`` and ``buckets``, so that a reader can compare the figures.
    """
    axis_end: float = 0  # milliseconds: the end of the slowest step that a reader can choose
    waits = {}  # {number of buckets: milliseconds}
    very_many_ranks = 10**6  # the time of an all-reduce grows with the ranks, up to a limit that it has reached here
    for count in BUCKET_COUNTS:
        slowest = overlap_schedule(very_many_ranks, count, gigabytes_per_second, milliseconds_of_latency)
        axis_end = max(axis_end, slowest[-1].end)
        waits[count] = exposed(overlap_schedule(world_size, count, gigabytes_per_second, milliseconds_of_latency))
    pixels_per_ms = (RIGHT - LEFT) / axis_end
    schedule = overlap_schedule(world_size, buckets, gigabytes_per_second, milliseconds_of_latency)

    height_above_the_bars = BOTTOM + 56
    fig, ax = canvas(660, height_above_the_bars + ROW * len(BUCKET_COUNTS))
    draw_legend(ax)
    draw_phases(ax, schedule, pixels_per_ms)
    for rank in range(world_size):
        draw_rank(ax, rank, world_size, schedule, pixels_per_ms)
    draw_time_axis(ax, axis_end, pixels_per_ms)
    draw_waits(ax, waits, buckets, pixels_per_ms)
    return fig


def look_of(label: str, color: str) -> dict[str, Any]:
    """How the spans with this label are filled and outlined, as arguments of ``boxes``: {argument: value}."""
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
    """Draw the legend, with a box and a name for each of PARTS. It is in ink, because every rank has its own colour."""
    box_width = 16
    gap = 6  # between a box and its name
    gap_between_entries = 18
    width_of_character = 9.5  # about, with the larger letters that a phone needs
    x: float = 0
    for label, name in PARTS.items():
        boxes(ax, [(x, 6, box_width, 13)], **look_of(label, INK))
        text_x = x + box_width + gap
        ax.text(text_x, 17, name)
        x = text_x + gap_between_entries + width_of_character * len(name)


def draw_phases(ax: Axes, schedule: Sequence[Span], pixels_per_ms: float) -> None:
    """Draw lines across all ranks where forward, backward, the wait and the optimizer's step begin and end."""
    wait_starts = FORWARD + BACKWARD
    step_ends = schedule[-1].end
    edges = [0, FORWARD, wait_starts, step_ends - OPTIMIZER_STEP, step_ends]  # milliseconds
    line_width = 0.8
    lines = []
    for ms in edges:
        lines.append((LEFT + ms * pixels_per_ms - line_width / 2, TOP, line_width, BOTTOM - TOP))
    boxes(ax, lines, facecolor=(INK, 0.3))
    width_of_text = 112
    x = min(LEFT + wait_starts * pixels_per_ms, RIGHT - width_of_text)
    ax.text(x, TOP - 8, f"waiting {exposed(schedule):.1f} ms", weight="bold")


def draw_rank(ax: Axes, rank: int, world_size: int, schedule: Sequence[Span], pixels_per_ms: float) -> None:
    """Draw one rank of the timeline: a row of boxes for what it computes, and below it a row for its all-reduces.

    y grows downwards. All ranks together are in the middle between TOP and BOTTOM.
    """
    rank_height = min((BOTTOM - TOP) / world_size, MAX_RANK_HEIGHT)
    top_of_all_ranks = (TOP + BOTTOM) / 2 - world_size / 2 * rank_height
    top_of_rank = top_of_all_ranks + rank * rank_height
    # The shares of a rank's height: a gap of 0.08, a row of 0.5, a gap of 0.04, a row of 0.3. The rest is empty.
    compute_y = top_of_rank + 0.08 * rank_height
    compute_height = 0.5 * rank_height
    network_y = compute_y + (0.5 + 0.04) * rank_height
    network_height = 0.3 * rank_height
    half_a_letter = 5  # from the middle of a text down to its baseline
    ax.text(LEFT - LABEL_GAP, compute_y + compute_height / 2 + half_a_letter, f"rank {rank}", ha="right")
    labels = dict.fromkeys(span.label for span in schedule)  # each once, in the order of the schedule
    for label in labels:
        if label == "all-reduce":
            y = network_y
            height = network_height
        else:
            y = compute_y
            height = compute_height
        rectangles = []
        for span in schedule:
            if span.label == label:
                x = LEFT + span.start * pixels_per_ms
                width = LEFT + span.end * pixels_per_ms - x
                rectangles.append((x, y, max(width - SPAN_GAP, MIN_SPAN_WIDTH), height))
        boxes(ax, rectangles, **look_of(label, rank_color(rank)))


def draw_time_axis(ax: Axes, axis_end: float, pixels_per_ms: float) -> None:
    """Draw the axis below the timeline: a line from 0 to ``axis_end`` milliseconds, with ticks and their numbers."""
    locator = MaxNLocator(6, integer=True)  # it chooses round numbers, at most seven
    ticks = [int(ms) for ms in locator.tick_values(0, axis_end) if ms <= axis_end]
    axis_y = BOTTOM + 6
    rectangles: list[Rectangle] = [(LEFT, axis_y, RIGHT - LEFT, 1)]
    for ms in ticks:
        rectangles.append((LEFT + ms * pixels_per_ms - 0.5, axis_y, 1, 5))
    boxes(ax, rectangles, facecolor=INK)
    for ms in ticks:
        if ms == 0:
            ax.text(LEFT, BOTTOM + 25, "0 ms", ha="left")  # it names the unit
        else:
            ax.text(LEFT + ms * pixels_per_ms, BOTTOM + 25, f"{ms}", ha="center")


def draw_waits(ax: Axes, waits: dict[int, float], buckets: int, pixels_per_ms: float) -> None:
    """Draw bars that show how long a step waits with each number of buckets, below the timeline and on its scale.

    ``waits`` is {number of buckets: milliseconds}. The bar of ``buckets``, the number that the timeline shows, is dark.
    """
    ax.text(LEFT, BOTTOM + 47, "waiting, by number of buckets")
    row_top = BOTTOM + 54
    for count, wait in waits.items():
        if count == buckets:
            weight = "bold"
            opacity = 1.0
        else:
            weight = "normal"
            opacity = 0.3
        bar_length = wait * pixels_per_ms
        boxes(ax, [(LEFT, row_top + 3, bar_length, 13)], facecolor=(INK, opacity))
        baseline = row_top + 14  # of the two texts, which are as tall as the bar
        ax.text(LEFT - LABEL_GAP, baseline, f"{count}", ha="right", weight=weight)
        ax.text(LEFT + bar_length + 6, baseline, f"{wait:.1f} ms", weight=weight)
        row_top += ROW


# --- the other figures ------------------------------------------------------------------------------------------------


@style()
def replicas() -> Figure:
    """A Figure of DDP's idea, with a column for each of four ranks, and from top to bottom what happens in a step.

    A rank's own shard of the batch and its own gradient have the rank's colour. What is equal on all ranks is in ink:
    the model, the mean of the gradients, and the weights after the step.
    """
    fig, ax = canvas(660, 352)  # all numbers below are pixels, and y grows downwards
    world_size = 4
    left = 128  # of the first column
    width = 120  # of a column
    gap = 14  # between two columns
    right = left + world_size * (width + gap) - gap

    ax.text(0, 47, "its shard")
    ax.text(0, 67, "of the batch")
    ax.text(0, 129, "its replica")
    ax.text(0, 149, "of the model")
    ax.text(0, 219, "its gradient")
    ax.text(0, 278, "all-reduce")
    ax.text(0, 332, "the same step")

    shared: dict[str, Any] = {"facecolor": (INK, 0.1), "edgecolor": INK, "linewidth": 1}  # equal on all ranks
    for rank in range(world_size):
        x = left + rank * (width + gap)
        center = x + width / 2
        color = rank_color(rank)
        private: dict[str, Any] = {"facecolor": (color, 0.4), "edgecolor": color, "linewidth": 1}
        ax.text(center, 18, f"rank {rank}", ha="center", weight="bold")
        boxes(ax, [(x, 32 + 14 * row, width, 11) for row in range(3)], **private)
        arrow_down(ax, center, 76, 98)
        layers = []  # of the model, each narrower than the one above
        for y, layer_width in [(102, width), (124, 0.8 * width), (146, 0.6 * width)]:
            layers.append((center - layer_width / 2, y, layer_width, 17))
        boxes(ax, layers, **shared)
        arrow_down(ax, center, 168, 196)
        boxes(ax, [(x, 200, width, 28)], **private)
        arrow_down(ax, center, 231, 255)
        arrow_down(ax, center, 290, 311)
        boxes(ax, [(x, 314, width, 28)], **shared)
        ax.text(center, 333, "equal weights", ha="center")

    boxes(ax, [(left, 258, right - left, 30)], **shared)
    ax.text((left + right) / 2, 278, f"the mean of {world_size} gradients, on every rank", ha="center")
    return fig


def arrow_down(ax: Axes, x: float, start: float, end: float) -> None:
    """Draw an arrow at ``x`` from the height ``start`` down to ``end``, in pixels."""
    look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "color": INK, "linewidth": 1}
    ax.add_artist(FancyArrowPatch((x, start), (x, end), shrinkA=0, shrinkB=0, clip_on=False, **look))
