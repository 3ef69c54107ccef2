"""Figures of chapters 1 and 2: ranks on their nodes, the numbers that they hold, and what a message costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from helpers.figures.drawing import INK, Rectangle, boxes, canvas, figure, rank_color, style

# All sizes and positions below are in pixels, and y grows downwards.

# --- ranks on their nodes ---------------------------------------------------------------------------------------------

NODE_GAP = 16  # between two nodes
RANK_GAP = 8  # between two ranks of a node
RANK_MARGIN = 10  # between a side of a node's frame and its ranks


@style()
def machines(nodes: int, per_node: int) -> Figure:
    """A Figure of nodes as frames, with their ranks inside. Each rank shows its rank, its local rank and its device."""
    fig, ax = canvas(660, 140)
    node_width = (660 - NODE_GAP * (nodes - 1)) / nodes
    rank_width = (node_width - 2 * RANK_MARGIN + RANK_GAP) / per_node - RANK_GAP
    for node in range(nodes):
        node_left = node * (node_width + NODE_GAP)
        boxes(ax, [(node_left + 1, 26, node_width - 2, 108)], facecolor="none", edgecolor=INK, linewidth=1)
        ax.text(node_left + node_width / 2, 17, f"node {node}", ha="center", weight="bold")

        for local_rank in range(per_node):
            rank = node * per_node + local_rank
            color = rank_color(rank)
            rank_left = node_left + RANK_MARGIN + local_rank * (rank_width + RANK_GAP)
            boxes(ax, [(rank_left, 38, rank_width, 84)], facecolor=(color, 0.25), edgecolor=color, linewidth=1)
            middle = rank_left + rank_width / 2
            ax.text(middle, 62, f"rank {rank}", ha="center", weight="bold")
            ax.text(middle, 88, f"local {local_rank}", ha="center")
            ax.text(middle, 110, f"cuda:{local_rank}", ha="center")
    return fig


# --- the numbers that ranks hold --------------------------------------------------------------------------------------

FIRST_CELL = 66  # the left side of a stage's cells, where the names of the ranks end
FIRST_ROW = 30  # the top of rank 0's cells
ROW = 42  # from one rank's cells to the next rank's
CELL_HEIGHT = 32
CELL_GAP = 4
WIDEST_CELL = 140


@dataclass(frozen=True)
class Arrival:
    """A number that one step of a collective has brought to a rank."""

    rank: int
    column: int  # of the rank's cell that has the number
    rows_above: int  # so many rows above is the rank that sent it; the number is negative if that rank is below


@style()
def tensors(stages: Mapping[str, Sequence[Sequence[int]]], arrivals: Sequence[Arrival] = ()) -> Figure:
    """A Figure of the numbers that up to four ranks hold, in one or more stages: {title: [rank 0's numbers, ...]}.

    The k-th digit of a number, from the right, came from rank k, so the number's cell is striped in these ranks'
    colours. The cells of ``arrivals`` get a thick frame; they are those of a figure with one stage.
    """
    fig, ax = canvas(660, 34 + 4 * ROW)
    stage_width = 640 / len(stages)
    most_columns = max(len(numbers) for numbers_of_ranks in stages.values() for numbers in numbers_of_ranks)
    column_width = min(WIDEST_CELL, (stage_width - 46) / most_columns)

    cells: list[Rectangle] = []
    stripes: dict[int, list[Rectangle]] = {}  # {rank: rectangles in its colour}
    for stage, (title, numbers_of_ranks) in enumerate(stages.items()):
        left = FIRST_CELL + stage * stage_width
        ax.text(left, 18, title, weight="bold")
        if stage > 0:
            ax.text(left - 29, FIRST_ROW + ROW / 2 * len(numbers_of_ranks), "→", ha="center", fontsize=17)
        for rank, numbers in enumerate(numbers_of_ranks):
            if stage == 0:
                ax.text(0, FIRST_ROW + ROW * rank + 20, f"rank {rank}")
            for column, number in enumerate(numbers):
                cell = cell_at(left, rank, column, column_width)
                cells.append(cell)
                x, y, _, _ = cell
                ax.text(x + column_width / 2 - 2, y + 21, str(number), ha="center", fontsize=12)
                for source, stripe in stripes_of(cell, number).items():
                    stripes.setdefault(source, []).append(stripe)

    for source, rectangles in sorted(stripes.items()):
        boxes(ax, rectangles, facecolor=(rank_color(source), 0.4), zorder=0.5)
    boxes(ax, cells, facecolor="none", edgecolor=INK, linewidth=0.8)
    for arrival in arrivals:
        cell = cell_at(FIRST_CELL, arrival.rank, arrival.column, column_width)
        # The script of the slider lets the cell come from there, in pixels to the right and downwards.
        move = f"move 0 {-ROW * arrival.rows_above}"
        boxes(ax, [cell], gid=move, facecolor=(0, 0, 0, 0.12), edgecolor=INK, linewidth=2.6)
    return fig


def cell_at(left: float, rank: int, column: int, column_width: float) -> Rectangle:
    """The rectangle of one number of a rank. ``left`` is the left side of the cells of its stage."""
    return (left + column * column_width, FIRST_ROW + ROW * rank, column_width - CELL_GAP, CELL_HEIGHT)


def stripes_of(cell: Rectangle, number: int) -> dict[int, Rectangle]:
    """Divide a number's cell into stripes of equal width: {rank that is in the number: its stripe}."""
    x, y, width, height = cell
    ranks = sources_of(number)
    stripe_width = width / len(ranks)
    stripes = {}
    for place, rank in enumerate(ranks):
        stripes[rank] = (x + place * stripe_width, y, stripe_width, height)
    return stripes


def sources_of(number: int) -> list[int]:
    """The ranks from which the digits of a number came: [0, 2] for 301, as the k-th from the right came from rank k."""
    digits_from_the_right = str(number)[::-1]
    sources = []
    for rank, digit in enumerate(digits_from_the_right):
        if digit != "0":
            sources.append(rank)
    return sources


def ring_step(rings: Mapping[int, Sequence[Sequence[Sequence[int]]]], world_size: int = 4, step: int = 0) -> Figure:
    """A Figure of all ranks' numbers after a step of a ring all-reduce. What the step brought is framed.

    ``rings`` has what was recorded: {world size: [rank 0's numbers before the first step and after each, ...]}. Step 0
    is before the first step. After the last one, 2 (N - 1) on N ranks, the numbers stay as they are.
    """
    last_step = 2 * (world_size - 1)
    recorded_step = min(step, last_step)
    numbers_of_ranks = [recorded[recorded_step] for recorded in rings[world_size]]
    if step > last_step:
        return tensors({f"done after {last_step} steps": numbers_of_ranks})
    if step == 0:
        return tensors({"before": numbers_of_ranks})

    arrivals = []
    for rank in range(world_size):
        if rank == 0:
            rows_above = 1 - world_size  # The last rank, at the bottom, sends to rank 0.
        else:
            rows_above = 1
        arrivals.append(Arrival(rank, column=(rank - step) % world_size, rows_above=rows_above))
    if step < world_size:
        verb = "added"
    else:
        verb = "copied"
    return tensors({f"step {step} of {last_step}: {verb}": numbers_of_ranks}, arrivals)


# --- what a message costs ---------------------------------------------------------------------------------------------

# How marks and curves look: {number of ranks: matplotlib's sign for it}.
MARKERS = {2: "o", 4: "^"}
DASHES = {2: "-", 4: "--"}
NAMES_OF_SIZES = {4: "4 B", 2**8: "256 B", 2**12: "4 KiB", 2**16: "64 KiB", 2**20: "1 MiB", 2**22: "4 MiB"}


@style()
def speeds_by_size(sizes: Sequence[int], seconds: Mapping[int, Sequence[float]]) -> Figure:
    """A Figure of how many bytes per second an all-reduce moves, for messages of several sizes.

    Marks show what was measured, and curves the model of ``model_speeds``. ``sizes`` are the bytes of the messages, and
    ``seconds`` is {number of ranks, 2 or 4: the time of each size}.
    """
    fig = figure(600, 340, layout="constrained")
    ax = fig.subplots()
    for world_size, times in seconds.items():
        speeds = [size / time / 1e6 for size, time in zip(sizes, times, strict=True)]  # MB/s
        model = [speed / 1e6 for speed in model_speeds(sizes, times)]  # MB/s
        label = f"{world_size} ranks: {1e6 * min(times):.0f} µs, {max(speeds):.0f} MB/s"
        ax.plot(sizes, speeds, MARKERS[world_size], color=INK, label=label)
        ax.plot(sizes, model, DASHES[world_size], color=INK)
        if world_size == 2:
            name_widest_gap(ax, sizes, speeds, model)
    ax.set(xscale="log", yscale="log", xlabel="bytes n of the message")
    ax.set_title("n / t (MB/s)")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xticks(sizes, [NAMES_OF_SIZES.get(size, "") for size in sizes])
    ax.minorticks_off()
    fig.legend(loc="outside upper left")
    return fig


def model_speeds(sizes: Sequence[int], times: Sequence[float]) -> list[float]:
    """The model's bytes per second of each size: n / (latency + n / bandwidth), with both from the measured times."""
    latency = min(times)
    bandwidth = max(size / time for size, time in zip(sizes, times, strict=True))
    return [size / (latency + size / bandwidth) for size in sizes]


def name_widest_gap(ax: Axes, sizes: Sequence[int], measured: Sequence[float], model: Sequence[float]) -> None:
    """Draw a line from the mark to the curve where the model is most optimistic, and write both speeds beside it.

    ``measured`` and ``model`` are the speeds for messages of these ``sizes``.
    """
    ratios = []
    for model_speed, measured_speed in zip(model, measured, strict=True):
        ratios.append(model_speed / measured_speed)
    widest = ratios.index(max(ratios))
    size = sizes[widest]
    model_speed = model[widest]
    measured_speed = measured[widest]
    ax.plot([size, size], [measured_speed, model_speed], ":", color=INK)
    both_speeds = f"model: {model_speed:.3g}\nmeasured: {measured_speed:.3g}"
    ax.text(size / 1.4, model_speed * 1.5, both_speeds, ha="right")
