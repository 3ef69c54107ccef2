"""Every layout of a model on a cluster: which are refused and why, which do not fit, and the rest by step time."""

import itertools
import re
from collections import Counter
from dataclasses import dataclass, field

from helpers.planner.conventions import Conventions, conventions_of
from helpers.planner.layout import Layout
from helpers.planner.memory import stage_memory
from helpers.planner.model import PlanError, check_fields, model_of
from helpers.planner.step_time import FACTOR, StepTime, step_time

SHOWN = (
    "tp",
    "pp",
    "cp",
    "ep",
    "zero",
    "shard",
    "micro_batch",
    "interleave",
    "recompute",
)  # what an explanation varies

MESH = ("tp", "pp", "cp", "ep")  # and dp is what is left of the GPUs


@dataclass(frozen=True)
class Candidate:
    """A layout that can be, with its time where it fits."""

    layout: Layout
    bytes: float  # of the fullest rank
    kind: str  # of memory, the largest there
    step: StepTime | None = None

    @property
    def seconds(self):
        return self.step.seconds


@dataclass
class Search:
    """What a search found."""

    model: object
    cluster: object
    conventions: Conventions
    fits: list = field(default_factory=list)  # [Candidate], the fastest first
    too_large: list = field(default_factory=list)  # [Candidate], the smallest first
    refused: Counter = field(default_factory=Counter)  # {reason: layouts}
    given: tuple = ()  # fields of a layout that the search left as they were given

    @property
    def best(self):
        """The Candidate with the least predicted seconds."""
        if not self.fits:
            raise self.none()
        return self.fits[0]

    def none(self):
        """The PlanError of a search in which no layout fits."""
        word = "fits" if self.too_large else "can be"
        return PlanError(f"no layout of {self.model.name} {word}.\n{self.explain()[-1]}")

    @property
    def tried(self):
        return len(self.fits) + len(self.too_large) + sum(self.refused.values())

    def by_memory(self):
        """{kind of memory: layouts that do not fit, and of whose bytes it has most}."""
        return Counter(candidate.kind for candidate in self.too_large)

    def explain(self):
        """A few lines: the choice, and why not its neighbours."""
        gib, gpus = 2**30, self.cluster.gpus
        lines = [
            f"{self.tried} layouts of {self.model.name} on {gpus} x {self.cluster.gpu}: "
            f"{sum(self.refused.values())} refused, {len(self.too_large)} do not fit, {len(self.fits)} ranked."
        ]
        if not self.fits:
            if not self.too_large:
                why = "; ".join(reason for reason, _ in self.refused.most_common(3))
                return [*lines, f"None can be: {why}. Give other sizes, or leave some out."]
            least = self.too_large[0]
            need = f"The smallest, {words(least.layout)}, needs {least.bytes / gib:.1f} GiB, most of it {least.kind}."
            return [*lines, f"None fits in {self.cluster.memory / gib:.1f} GiB. {need} {self.advice()}"]
        best = self.fits[0]
        lines.append(
            f"Fastest: {words(best.layout)}: {best.seconds:.2f} s a step ({best.step.low:.2f} to {best.step.high:.2f})"
            f", {best.bytes / gib:.1f} of {self.cluster.memory / gib:.1f} GiB."
        )
        said = {best.layout}
        for name in SHOWN:
            for value in self.neighbours(name):
                other, line = self.why_not(name, value)
                if other not in said:
                    said.add(other)
                    lines.append(line)
        close = sum(candidate.seconds <= best.seconds * FACTOR for candidate in self.fits) - 1
        return [
            *lines,
            f"{close} more within a factor of {FACTOR} of it, which a prediction may be off: measure a few.",
        ]

    def advice(self):
        """What to try where nothing fits: only what the smallest layout does not do already."""
        least = self.too_large[0]
        tries = ["more GPUs"]
        if least.layout.recompute != "full":
            tries.append("recompute = full")
        if least.kind == "optimizer" and not least.layout.offload:
            tries.append("offload = true")
        free = [name for name in self.given if name in SHOWN and name != "recompute"]
        left = f", or leave out what is given: {', '.join(free)}" if free else ""
        return f"Give {', or '.join(tries)}{left}."

    def neighbours(self, name):
        """The values just below and above the best one's that were tried."""
        here = getattr(self.fits[0].layout, name)
        values = {getattr(candidate.layout, name) for candidate in (*self.fits, *self.too_large)}
        if name == "recompute":
            return sorted(values - {here})
        below, above = sorted(v for v in values if v < here), sorted(v for v in values if v > here)
        return below[-1:] + above[:1]

    def why_not(self, name, value):
        """(layout, line): the best layout with this value, or the smallest, where none fits."""
        best, label = self.fits[0], f"{name} = {value}"
        if other := next((one for one in self.fits if getattr(one.layout, name) == value), None):
            more = {part: other.step.parts[part] - best.step.parts[part] for part in best.step.parts}
            ends = [max(more, key=more.get), min(more, key=more.get)]
            changes = ", ".join(f"{part} {more[part]:+.2f} s" for part in ends if abs(more[part]) >= 0.005)
            slower = other.seconds / best.seconds - 1
            return (
                other.layout,
                f"Why not {label}? {slower:+.1%} with {words(other.layout)}: {changes or 'much the same'}.",
            )
        other = next(one for one in self.too_large if getattr(one.layout, name) == value)
        need = f"{other.bytes / 2**30:.1f} GiB, most of it {other.kind}"
        return other.layout, f"Why not {label}? The smallest, {words(other.layout)}, needs {need}."


def words(layout):
    """The sizes that are not 1, in a few words."""
    names = ("dp", "tp", "pp", "cp", "ep", "zero", "shard", "interleave")
    said = [f"{name} {getattr(layout, name)}" for name in names if shown(name, getattr(layout, name))]
    said += [f"micro-batch {layout.micro_batch}"]
    return ", ".join(said + [f"recompute {layout.recompute}"] * (layout.recompute != "none"))


def shown(name, value):
    """Whether a size says something: a mesh's dimension above 1, ZeRO above 0."""
    return value > (0 if name in ("zero", "shard") else 1)


def powers(largest):
    """1, 2, 4, … up to the largest."""
    return [2**power for power in range(max(int(largest), 1).bit_length())]


def choices(model, cluster, attention="flash"):
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


def search(model, cluster, batch, conventions=None, **given):
    """The Search over all layouts with a batch of so many samples.

    given: a Layout's field and its value, or a list of values to try instead of the default's; cluster is a Cluster.
    With tensor parallelism, sequence parallelism too, unless given.
    """
    model, conventions = model_of(model), conventions_of(conventions)
    check_fields(Layout, {name: value for name, value in given.items() if not isinstance(value, list)}, "the layout")
    check_fields(Layout, {"batch": batch}, "the layout")
    table = choices(model, cluster, given.get("attention", "flash"))
    table |= {name: value if isinstance(value, (list, tuple)) else [value] for name, value in given.items()}
    found = Search(model, cluster, conventions, given=tuple(given))
    dtype = table.get("dtype", ["bfloat16"])[0]
    cluster.peak(dtype)  # or the error would count for every layout
    inner = [name for name in table if name not in MESH]
    every = [dict(zip(inner, values, strict=True)) for values in itertools.product(*(table[name] for name in inner))]
    every = [step for step in every if step["zero"] == 3 or not step["shard"]]  # or HSDP would say nothing
    for mesh in itertools.product(*(table[name] for name in MESH)):
        sizes = dict(zip(MESH, mesh, strict=True))
        ranks = sizes["tp"] * sizes["pp"] * sizes["cp"]
        steps = [step for step in every if sizes["pp"] > 1 or step["interleave"] == 1]
        if cluster.gpus % ranks:
            found.refused["tp x pp x cp does not divide the GPUs"] += len(steps)
            continue
        sizes |= {"dp": cluster.gpus // ranks, "sequence_parallel": sizes["tp"] > 1}
        steps = [step for step in steps if step["shard"] < sizes["dp"] * sizes["cp"]]
        try:
            Layout(**sizes, uneven_stages=any(table.get("uneven_stages", ()))).check(model, cluster)
        except PlanError as error:
            found.refused[reason(error)] += len(steps)
            continue
        for step in steps:
            try:
                layout = Layout(batch=batch, **(sizes | step)).check(model, cluster)
            except PlanError as error:
                found.refused[reason(error)] += 1
                continue
            size, kind = fullest(model, layout, conventions)
            if size > cluster.memory:
                found.too_large.append(Candidate(layout, size, kind))
            else:
                found.fits.append(Candidate(layout, size, kind, step_time(model, layout, cluster, conventions)))
    found.fits.sort(key=lambda one: one.seconds)
    found.too_large.sort(key=lambda one: one.bytes)
    return found


def reason(error):
    """The first line of a refusal without its numbers, so that equal reasons count together."""
    line = re.sub(r"\([^)]*\d[^)]*\)|( of|[x=])? ?\d[\d.]*( x)?", "", str(error).splitlines()[0])
    return re.sub(r"\s+(?=:)", "", re.sub(r"\s+", " ", line)).strip(" .")


def fullest(model, layout, conventions):
    """(bytes, largest kind) of the fullest rank: of the first, second or last stage, where the layers are even."""
    stages = range(layout.pp) if layout.uneven_stages else sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    kinds = max((stage_memory(model, layout, conventions, stage) for stage in stages), key=lambda one: one["total"])
    total = kinds.pop("total")
    return total, max(kinds, key=kinds.get)
