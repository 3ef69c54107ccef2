"""Every layout of a model on a cluster: which are refused and why, which do not fit, and the rest by step time."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from helpers.planner.cluster import Cluster
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.memory import stage_memory
from helpers.planner.model import Model, model_of
from helpers.planner.records import PlanError
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

    @property
    def need(self) -> str:
        return f"The smallest, {words(self.layout)}, needs {self.bytes / GIB:.1f} GiB, most of it {self.kind}."


@dataclass(frozen=True)
class Fit(Candidate):
    """A layout that fits, with its time."""

    step: StepTime

    @property
    def seconds(self) -> float:
        return self.step.seconds


@dataclass
class Search:
    """The layouts of a model on a cluster."""

    model: Model
    cluster: Cluster
    conventions: Conventions
    constraints: tuple[str, ...] = ()  # fields of a layout that the caller chose
    fits: list[Fit] = field(default_factory=list)  # the fastest first
    too_large: list[Candidate] = field(default_factory=list)  # the smallest first
    refusals: Counter[str] = field(default_factory=Counter)  # {reason: layouts}

    def add(self, fields: dict[str, Any]) -> None:
        """Count a layout among those that are refused, too large or fit."""
        try:
            layout = Layout(**fields).check(self.model, self.cluster)
        except PlanError as error:
            self.refusals[reason(error)] += 1
            return
        size, kind = fullest(self.model, layout, self.conventions)
        if size > self.cluster.memory:
            self.too_large.append(Candidate(layout, size, kind))
        else:
            step = step_time(self.model, layout, self.cluster, self.conventions)
            self.fits.append(Fit(layout, size, kind, step))

    @property
    def best(self) -> Fit:
        """The layout with the least predicted seconds; PlanError where none fits."""
        if not self.fits:
            raise self.none()
        return self.fits[0]

    def none(self) -> PlanError:
        """The PlanError of a search in which no layout fits."""
        return PlanError(f"no layout of {self.model.name} {'fits' if self.too_large else 'can be'}.\n{self.advice()}")

    @property
    def tried(self) -> int:
        return len(self.fits) + len(self.too_large) + self.refusals.total()

    def by_memory(self) -> Counter[str]:
        """{kind of memory: layouts that do not fit, and of whose bytes it has most}."""
        return Counter(candidate.kind for candidate in self.too_large)

    def explain(self) -> list[str]:
        """A few lines: the choice, and why not its neighbours."""
        head = (
            f"{self.tried} layouts of {self.model.name} on {self.cluster.gpus} x {self.cluster.gpu}: "
            f"{self.refusals.total()} refused, {len(self.too_large)} do not fit, {len(self.fits)} ranked."
        )
        if not self.fits:
            return [head, self.advice()]
        best = self.best
        choice = (
            f"Fastest: {words(best.layout)}: {best.seconds:.2f} s a step ({best.step.low:.2f} to {best.step.high:.2f})"
            f", {best.bytes / GIB:.1f} of {self.cluster.memory / GIB:.1f} GiB."
        )
        reasons: dict[Layout, str] = {}
        for name in VARIED:
            for value in self.neighbours(name):
                other, line = self.why_not(name, value)
                reasons.setdefault(other, line)
        close = sum(fit.seconds <= best.seconds * FACTOR for fit in self.fits) - 1
        end = f"{close} more within a factor of {FACTOR} of it, which a prediction may be off: measure a few."
        return [head, choice, *reasons.values(), end]

    def advice(self) -> str:
        """Why no layout fits, and what to try: only what the smallest layout does not do already."""
        if not self.too_large:
            why = "; ".join(reason for reason, _ in self.refusals.most_common(3))
            return f"None can be: {why}. Give other sizes or another --gpus, or leave some out."
        least, tries = self.too_large[0], ["more GPUs"]
        if least.layout.recompute != "full":
            tries.append("recompute = full")
        if least.kind == "optimizer" and not least.layout.offload:
            tries.append("offload = true")
        if free := [name for name in self.constraints if name in VARIED and name != "recompute"]:
            tries.append(f"leave out what is given: {', '.join(free)}")
        return f"None fits in {self.cluster.memory / GIB:.1f} GiB. {least.need} Give {', or '.join(tries)}."

    def neighbours(self, name: str) -> list[Any]:
        """The values just below and above the best one's that were tried."""
        here = getattr(self.best.layout, name)
        values = {getattr(candidate.layout, name) for candidate in (*self.fits, *self.too_large)}
        if name == "recompute":
            return sorted(values - {here})
        return sorted(v for v in values if v < here)[-1:] + sorted(v for v in values if v > here)[:1]

    def why_not(self, name: str, value: Any) -> tuple[Layout, str]:
        """(layout, line): the best layout with this value, or the smallest, where none fits."""
        label, best = f"Why not {name} = {value}?", self.best
        for fit in self.fits:
            if getattr(fit.layout, name) == value:
                more = {part: fit.step.parts[part] - seconds for part, seconds in best.step.parts.items()}
                ends = [max(more, key=more.__getitem__), min(more, key=more.__getitem__)]
                changes = ", ".join(f"{part} {more[part]:+.2f} s" for part in ends if abs(more[part]) >= 0.005)
                slower = f"{fit.seconds / best.seconds - 1:+.1%} with {words(fit.layout)}"
                return fit.layout, f"{label} {slower}: {changes or 'much the same'}."
        least = next(candidate for candidate in self.too_large if getattr(candidate.layout, name) == value)
        return least.layout, f"{label} {least.need}"


def words(layout: Layout) -> str:
    """The sizes that say something, in a few words: a mesh's dimension above 1, ZeRO above 0."""
    names = ("dp", "tp", "pp", "cp", "ep", "zero", "shard", "interleave")
    sizes = {name: getattr(layout, name) for name in names}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > (name not in ("zero", "shard"))]
    parts += [f"micro-batch {layout.micro_batch}"] + [f"recompute {layout.recompute}"] * (layout.recompute != "none")
    return ", ".join(parts)


def choices(model: Model, cluster: Cluster, attention: str = "flash") -> dict[str, list[Any]]:
    """{field: values} that a search tries by default: tp up to two nodes, so that it is seen why not."""
    node, gpus = cluster.gpus_per_node, cluster.gpus
    return {
        "tp": [2**power for power in range(min(2 * node, gpus).bit_length())],
        "pp": [size for size in range(1, min(model.layers, gpus) + 1) if gpus % size == 0],
        "cp": [1, 2, 4, 8] if model.seq > 16384 else [1],
        "ep": sorted({1, min(model.experts, node), model.experts} - {0}),
        "zero": [1, 3],
        "shard": [0, node],
        "micro_batch": [1, 2, 4, 8],
        "interleave": [1, 2, 4],
        "recompute": ["none", "selective" if attention == "scores" else "sac", "full"],
        "attention": [attention],
    }


def products(table: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Each {name: value}."""
    return (dict(zip(table, values, strict=True)) for values in itertools.product(*table.values()))


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
    for name, values in {**{name: table[name] for name in constraints}, "batch": [batch]}.items():
        for value in values:  # or an error would count for every layout
            Layout.check_fields({name: value})
    for dtype in table.get("dtype", []):
        cluster.peak(dtype)
    result = Search(model, cluster, Conventions.of(conventions or {}), tuple(constraints))
    mesh_table = {name: table.pop(name) for name in MESH}
    inner = [step for step in products(table) if step["zero"] == 3 or not step["shard"]]  # or HSDP would say nothing
    for mesh in products(mesh_table):
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
            result.add({"batch": batch, **sizes, **step})
    result.fits.sort(key=lambda fit: fit.seconds)
    result.too_large.sort(key=lambda candidate: candidate.bytes)
    return result


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
