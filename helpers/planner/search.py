"""Every layout of a model on a cluster: which are refused and why, which do not fit, and the rest by step time."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from helpers.planner.cluster import Cluster
from helpers.planner.conventions import Conventions, conventions_of
from helpers.planner.layout import Layout
from helpers.planner.memory import stage_memory
from helpers.planner.model import Model, model_of
from helpers.planner.records import PlanError, check_fields
from helpers.planner.step_time import FACTOR, StepTime, step_time

MESH = ("tp", "pp", "cp", "ep")  # and dp is what is left of the GPUs
VARIED = (*MESH, "zero", "shard", "micro_batch", "interleave", "recompute")  # by an explanation
GIB = 2**30


@dataclass(frozen=True)
class Candidate:
    """A layout that can be."""

    layout: Layout
    bytes: float  # of the fullest rank
    kind: str  # of memory, the largest there


@dataclass(frozen=True)
class Fit(Candidate):
    """A layout that fits, with its time."""

    step: StepTime

    @property
    def seconds(self) -> float:
        return self.step.seconds


@dataclass
class Search:
    """What a search found."""

    model: Model
    cluster: Cluster
    conventions: Conventions
    constraints: tuple[str, ...] = ()  # fields of a layout that the caller chose
    fits: list[Fit] = field(default_factory=list)  # the fastest first
    too_large: list[Candidate] = field(default_factory=list)  # the smallest first
    refusals: Counter[str] = field(default_factory=Counter)  # {reason: layouts}

    @property
    def best(self) -> Fit:
        """The layout with the least predicted seconds."""
        if not self.fits:
            raise self.none()
        return self.fits[0]

    def none(self) -> PlanError:
        """The PlanError of a search in which no layout fits."""
        word = "fits" if self.too_large else "can be"
        return PlanError(f"no layout of {self.model.name} {word}.\n{self.explain()[-1]}")

    @property
    def tried(self) -> int:
        return len(self.fits) + len(self.too_large) + sum(self.refusals.values())

    def by_memory(self) -> Counter[str]:
        """{kind of memory: layouts that do not fit, and of whose bytes it has most}."""
        return Counter(candidate.kind for candidate in self.too_large)

    def explain(self) -> list[str]:
        """A few lines: the choice, and why not its neighbours."""
        lines = [
            f"{self.tried} layouts of {self.model.name} on {self.cluster.gpus} x {self.cluster.gpu}: "
            f"{sum(self.refusals.values())} refused, {len(self.too_large)} do not fit, {len(self.fits)} ranked."
        ]
        if not self.fits:
            if not self.too_large:
                why = "; ".join(reason for reason, _ in self.refusals.most_common(3))
                return [*lines, f"None can be: {why}. Give other sizes, or leave some out."]
            least = self.too_large[0]
            need = f"The smallest, {words(least.layout)}, needs {least.bytes / GIB:.1f} GiB, most of it {least.kind}."
            return [*lines, f"None fits in {self.cluster.memory / GIB:.1f} GiB. {need} {self.advice()}"]
        best = self.fits[0]
        lines.append(
            f"Fastest: {words(best.layout)}: {best.seconds:.2f} s a step ({best.step.low:.2f} to {best.step.high:.2f})"
            f", {best.bytes / GIB:.1f} of {self.cluster.memory / GIB:.1f} GiB."
        )
        shown = {best.layout}
        for name in VARIED:
            for value in self.neighbours(name):
                other, line = self.why_not(name, value)
                if other not in shown:
                    shown.add(other)
                    lines.append(line)
        close = sum(candidate.seconds <= best.seconds * FACTOR for candidate in self.fits) - 1
        return [
            *lines,
            f"{close} more within a factor of {FACTOR} of it, which a prediction may be off: measure a few.",
        ]

    def advice(self) -> str:
        """What to try where nothing fits: only what the smallest layout does not do already."""
        least = self.too_large[0]
        tries = ["more GPUs"]
        if least.layout.recompute != "full":
            tries.append("recompute = full")
        if least.kind == "optimizer" and not least.layout.offload:
            tries.append("offload = true")
        free = [name for name in self.constraints if name in VARIED and name != "recompute"]
        left = f", or leave out what is given: {', '.join(free)}" if free else ""
        return f"Give {', or '.join(tries)}{left}."

    def neighbours(self, name: str) -> list[Any]:
        """The values just below and above the best one's that were tried."""
        here = getattr(self.fits[0].layout, name)
        values = {getattr(candidate.layout, name) for candidate in (*self.fits, *self.too_large)}
        if name == "recompute":
            return sorted(values - {here})
        below, above = sorted(v for v in values if v < here), sorted(v for v in values if v > here)
        return below[-1:] + above[:1]

    def why_not(self, name: str, value: Any) -> tuple[Layout, str]:
        """(layout, line): the best layout with this value, or the smallest, where none fits."""
        best, label = self.fits[0], f"{name} = {value}"
        if other := next((candidate for candidate in self.fits if getattr(candidate.layout, name) == value), None):
            more = {part: other.step.parts[part] - best.step.parts[part] for part in best.step.parts}
            ends = [max(more, key=more.__getitem__), min(more, key=more.__getitem__)]
            changes = ", ".join(f"{part} {more[part]:+.2f} s" for part in ends if abs(more[part]) >= 0.005)
            slower = other.seconds / best.seconds - 1
            return (
                other.layout,
                f"Why not {label}? {slower:+.1%} with {words(other.layout)}: {changes or 'much the same'}.",
            )
        least = next(candidate for candidate in self.too_large if getattr(candidate.layout, name) == value)
        need = f"{least.bytes / GIB:.1f} GiB, most of it {least.kind}"
        return least.layout, f"Why not {label}? The smallest, {words(least.layout)}, needs {need}."


def words(layout: Layout) -> str:
    """The sizes that say something, in a few words: a mesh's dimension above 1, ZeRO above 0."""
    names = ("dp", "tp", "pp", "cp", "ep", "zero", "shard", "interleave")
    sizes = {name: getattr(layout, name) for name in names}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > (name not in ("zero", "shard"))]
    parts += [f"micro-batch {layout.micro_batch}"] + [f"recompute {layout.recompute}"] * (layout.recompute != "none")
    return ", ".join(parts)


def powers(largest: float) -> list[int]:
    """1, 2, 4, … up to the largest."""
    return [2**power for power in range(max(int(largest), 1).bit_length())]


def choices(model: Model, cluster: Cluster, attention: str = "flash") -> dict[str, list[Any]]:
    """{field: values} that a search tries by default: tp up to two nodes, so that it is seen why not."""
    return {
        "tp": powers(min(2 * cluster.gpus_per_node, cluster.gpus)),
        "pp": [size for size in range(1, min(model.layers, cluster.gpus) + 1) if cluster.gpus % size == 0],
        "cp": powers(8) if model.seq > 16384 else [1],
        "ep": sorted({1, min(model.experts, cluster.gpus_per_node), model.experts} - {0}),
        "zero": [1, 3],
        "shard": [0, cluster.gpus_per_node],
        "micro_batch": [1, 2, 4, 8],
        "interleave": [1, 2, 4],
        "recompute": ["none", "full"] + ["selective"] * (attention == "scores"),
        "attention": [attention],
    }


def products(table: dict[str, list[Any]], names: list[str]) -> Iterator[dict[str, Any]]:
    """Each {name: value}."""
    for values in itertools.product(*(table[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def search(
    model: str | dict[str, Any] | Model,
    cluster: Cluster,
    batch: int,
    conventions: dict[str, Any] | Conventions | None = None,
    **constraints: Any,
) -> Search:
    """The Search over all layouts with a batch of so many samples.

    constraints: a Layout's field and its value, or a list of values to try instead of the default's. With tensor
    parallelism, sequence parallelism too, unless it is one of them.
    """
    model = model_of(model)
    table = choices(model, cluster, constraints.get("attention", "flash"))
    table |= {name: list(value) if isinstance(value, (list, tuple)) else [value] for name, value in constraints.items()}
    for name in constraints:  # or an error would count for every layout
        for value in table[name]:
            check_fields(Layout, {name: value})
    check_fields(Layout, {"batch": batch})
    for dtype in table.get("dtype", []):
        cluster.peak(dtype)
    result = Search(model, cluster, conventions_of(conventions), tuple(constraints))
    inner = list(products(table, [name for name in table if name not in MESH]))
    inner = [step for step in inner if step["zero"] == 3 or not step["shard"]]  # or HSDP would say nothing
    for mesh in products(table, list(MESH)):
        steps = [step for step in inner if mesh["pp"] > 1 or step["interleave"] == 1]
        ranks = mesh["tp"] * mesh["pp"] * mesh["cp"]
        if cluster.gpus % ranks:
            result.refusals["tp x pp x cp does not divide the GPUs"] += len(steps)
            continue
        sizes = {**mesh, "dp": cluster.gpus // ranks, "sequence_parallel": mesh["tp"] > 1}
        steps = [step for step in steps if step["shard"] < sizes["dp"] * sizes["cp"]]
        try:
            Layout(**sizes, uneven_stages=any(table.get("uneven_stages", ()))).check(model, cluster)
        except PlanError as error:
            result.refusals[reason(error)] += len(steps)
            continue
        for step in steps:
            add(result, {"batch": batch, **sizes, **step})
    result.fits.sort(key=lambda candidate: candidate.seconds)
    result.too_large.sort(key=lambda candidate: candidate.bytes)
    return result


def add(result: Search, fields: dict[str, Any]) -> None:
    """Refuse a layout, or put it among those that fit or are too large."""
    try:
        layout = Layout(**fields).check(result.model, result.cluster)
    except PlanError as error:
        result.refusals[reason(error)] += 1
        return
    size, kind = fullest(result.model, layout, result.conventions)
    if size > result.cluster.memory:
        result.too_large.append(Candidate(layout, size, kind))
    else:
        step = step_time(result.model, layout, result.cluster, result.conventions)
        result.fits.append(Fit(layout, size, kind, step))


def reason(error: PlanError) -> str:
    """The first line of a refusal without its numbers, so that equal reasons count together."""
    line = re.sub(r"\([^)]*\d[^)]*\)|( of|[x=])? ?\d[\d.]*( x)?", "", str(error).splitlines()[0])
    return re.sub(r"\s+(?=:)", "", re.sub(r"\s+", " ", line)).strip(" .")


def fullest(model: Model, layout: Layout, conventions: Conventions) -> tuple[float, str]:
    """(bytes, largest kind) of the fullest rank: of the first, second or last stage, where the layers are even."""
    stages = range(layout.pp) if layout.uneven_stages else sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    kinds = max((stage_memory(model, layout, conventions, stage) for stage in stages), key=lambda kinds: kinds["total"])
    total = kinds.pop("total")
    return total, max(kinds, key=kinds.__getitem__)
