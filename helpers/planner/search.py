"""Every layout of a model on a cluster: which are refused and why, which do not fit, and the rest by step time."""

import itertools
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
from helpers.planner.step_time import INTERVAL_FACTOR, StepTime, step_time

MESH = ("tp", "pp", "cp", "ep")  # The other GPUs are dp.
EXPLAINED = (*MESH, "zero", "shard", "micro_batch", "interleave", "recompute")
GIB = 2**30


@dataclass(frozen=True)
class Candidate:
    """A layout that is possible, and what its fullest rank needs."""

    layout: Layout
    bytes: float
    largest: str  # kind of memory there

    @property
    def need(self) -> str:
        size = f"{self.bytes / GIB:.1f} GiB"
        return f"The smallest, {self.layout.summary}, needs {size}, most of it {self.largest}."


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
    refusals: Counter[str] = field(default_factory=Counter)  # {what is wrong: layouts that are refused for it}

    def add(self, fields: dict[str, Any]) -> None:
        """Check a layout, and put it among those that are refused, too large or fit."""
        try:
            layout = Layout(**fields).check(self.model, self.cluster)
        except PlanError as error:
            self.refusals[error.problem] += 1
            return
        kinds = fullest_stage(self.model, layout, self.conventions)
        size = kinds.pop("total")
        largest = max(kinds, key=lambda kind: kinds[kind])
        if size > self.cluster.memory:
            self.too_large.append(Candidate(layout, size, largest))
        else:
            step = step_time(self.model, layout, self.cluster, self.conventions)
            self.fits.append(Fit(layout, size, largest, step))

    @property
    def best(self) -> Fit:
        """The layout with the fewest predicted seconds; PlanError where none fits."""
        if not self.fits:
            raise self.error()
        return self.fits[0]

    def error(self) -> PlanError:
        """The PlanError of a search in which no layout fits."""
        verb = "fits" if self.too_large else "can be"
        return PlanError(f"no layout of {self.model.name} {verb}.\n{self.advice}")

    @property
    def tried(self) -> int:
        return len(self.fits) + len(self.too_large) + self.refusals.total()

    # --- The search in words ---

    def explain(self) -> list[str]:
        """A few lines: the counts, the choice, why not its neighbours, and how close the next ones are."""
        return [self.counts, self.choice, *self.reasons(), self.margin]

    @property
    def counts(self) -> str:
        return (
            f"{self.tried} layouts of {self.model.name} on {self.cluster.gpus} x {self.cluster.gpu}: "
            f"{self.refusals.total()} refused, {len(self.too_large)} do not fit, {len(self.fits)} ranked."
        )

    @property
    def choice(self) -> str:
        best = self.best
        time = f"{best.seconds:.2f} s a step ({best.step.low:.2f} to {best.step.high:.2f})"
        memory = f"{best.bytes / GIB:.1f} of {self.cluster.memory / GIB:.1f} GiB"
        return f"Fastest: {best.layout.summary}: {time}, {memory}."

    @property
    def margin(self) -> str:
        close = [fit for fit in self.fits[1:] if fit.seconds <= self.best.seconds * INTERVAL_FACTOR]
        interval = f"within a factor of {INTERVAL_FACTOR} of it, which a prediction may be off"
        return f"{len(close)} more {interval}: measure a few."

    @property
    def advice(self) -> str:
        """Why no layout fits, and what to try."""
        chosen = [name for name in self.constraints if name in EXPLAINED]
        given = ""
        if chosen:
            given = f", or leave out what is given: {', '.join(chosen)}"
        if not self.too_large:
            (problem, _), *_ = self.refusals.most_common(1)
            return f"None can be: {problem}. Give other sizes or another --gpus{given}."
        options = "more GPUs, recompute = full or offload = true"
        return f"None fits in {self.cluster.memory / GIB:.1f} GiB. {self.too_large[0].need} Give {options}{given}."

    def reasons(self) -> list[str]:
        """Lines that say, field by field, why not the values next to the best layout's."""
        lines: dict[Layout, str] = {}  # One layout may stand for several values; it is named once.
        for name in EXPLAINED:
            for value in self.values_beside_the_best(name):
                layout, line = self.why_not(name, value)
                lines.setdefault(layout, line)
        return list(lines.values())

    def values_beside_the_best(self, name: str) -> list[Any]:
        """The values of a field that were tried, just below and above the best one's; every one of recompute."""
        best = getattr(self.best.layout, name)
        values = {getattr(candidate.layout, name) for candidate in (*self.fits, *self.too_large)}
        if name == "recompute":
            return sorted(values - {best})
        below = [value for value in values if value < best]
        above = [value for value in values if value > best]
        return sorted(below)[-1:] + sorted(above)[:1]

    def why_not(self, name: str, value: Any) -> tuple[Layout, str]:
        """The best layout with this value, or the smallest where none fits, and a line about it."""
        question = f"Why not {name} = {value}?"
        best = self.best
        for fit in self.fits:  # the fastest first
            if getattr(fit.layout, name) == value:
                slower = f"{fit.seconds / best.seconds - 1:+.1%}"
                parts = differences(fit.step, best.step)
                return fit.layout, f"{question} {slower} with {fit.layout.summary}: {parts}."
        with_value = [candidate for candidate in self.too_large if getattr(candidate.layout, name) == value]
        smallest = with_value[0]
        return smallest.layout, f"{question} {smallest.need}"


def differences(step: StepTime, best: StepTime) -> str:
    """The part of a step that takes longest beside the best one's, and the one that saves most."""
    seconds_more = {part: step.parts[part] - seconds for part, seconds in best.parts.items()}
    most = max(seconds_more, key=lambda part: seconds_more[part])
    least = min(seconds_more, key=lambda part: seconds_more[part])
    shown = []
    for part in (most, least):
        if abs(seconds_more[part]) >= 0.005:  # It would be printed as 0.00 s.
            shown.append(f"{part} {seconds_more[part]:+.2f} s")
    if not shown:
        return "much the same"
    return ", ".join(shown)


def fullest_stage(model: Model, layout: Layout, conventions: Conventions) -> dict[str, float]:
    """{kind: bytes} of the fullest rank: of the first, second or last stage, unless stages have different layers."""
    stages = {0, min(1, layout.pp - 1), layout.pp - 1}
    if layout.uneven_stages:
        stages = set(range(layout.pp))
    memories = [stage_memory(model, layout, conventions, stage) for stage in sorted(stages)]
    return max(memories, key=lambda kinds: kinds["total"])


def search(
    model: str | dict[str, Any] | Model,
    cluster: Cluster,
    batch: int,
    conventions: dict[str, Any] | Conventions | None = None,
    **constraints: Any,
) -> Search:
    """Try all layouts of a model on a cluster, with a batch of so many samples, and rank those that fit.

    constraints: a Layout's field and its value, or a list of values to try instead of the default's. With tensor
    parallelism, sequence parallelism too, unless it is one of them.
    """
    model = model_of(model)
    options = choices(model, cluster, constraints.get("attention", "flash"))
    for name, value in constraints.items():
        options[name] = list(value) if isinstance(value, (list, tuple)) else [value]
    # A wrong value is refused once, and not counted for every layout.
    for name, values in {**options, "batch": [batch]}.items():
        for value in values:
            Layout.check_fields({name: value})
    for dtype in options.get("dtype", []):
        cluster.peak(dtype)

    result = Search(model, cluster, Conventions.of(conventions or {}), tuple(constraints))
    mesh_options = {name: options.pop(name) for name in MESH}
    may_be_uneven = any(options.get("uneven_stages", ()))
    # HSDP, a shard among fewer ranks than all, is tried with ZeRO-3 only.
    settings = [setting for setting in combinations(options) if setting["zero"] == 3 or setting["shard"] == 0]
    for mesh in combinations(mesh_options):
        # Only stages can be interleaved.
        possible = [setting for setting in settings if mesh["pp"] > 1 or setting["interleave"] == 1]
        ranks = mesh["tp"] * mesh["pp"] * mesh["cp"]
        if cluster.gpus % ranks != 0:
            result.refusals["tp x pp x cp does not divide the GPUs"] += len(possible)
            continue
        sizes = {**mesh, "dp": cluster.gpus // ranks, "sequence_parallel": mesh["tp"] > 1}
        # A shard among all data-parallel ranks is what 0 stands for, so it is not tried twice.
        possible = [setting for setting in possible if setting["shard"] < sizes["dp"] * sizes["cp"]]
        # What is wrong with the mesh alone is found once for all settings.
        try:
            Layout(**sizes, uneven_stages=may_be_uneven).check(model, cluster)
        except PlanError as error:
            result.refusals[error.problem] += len(possible)
            continue
        for setting in possible:
            result.add({"batch": batch, **sizes, **setting})
    result.fits.sort(key=lambda fit: fit.step.rounded)
    result.too_large.sort(key=lambda candidate: candidate.bytes)
    return result


def choices(model: Model, cluster: Cluster, attention: str = "flash") -> dict[str, list[Any]]:
    """The values of each field that a search tries by default: {field: values}."""
    node = cluster.gpus_per_node
    gpus = cluster.gpus
    powers_of_two = [2**power for power in range(gpus.bit_length())]
    ep_sizes = {1}
    if model.experts:
        ep_sizes |= {min(model.experts, node), model.experts}
    return {
        "tp": [size for size in powers_of_two if size <= 2 * node],  # up to two nodes, so that it is seen why not
        "pp": [size for size in range(1, min(model.layers, gpus) + 1) if gpus % size == 0],
        "cp": [1, 2, 4, 8] if model.seq > 16384 else [1],
        "ep": sorted(ep_sizes),
        "zero": [1, 3],
        "shard": [0, node],
        "micro_batch": [1, 2, 4, 8],
        "interleave": [1, 2, 4],
        "recompute": ["none", "selective" if attention == "scores" else "sac", "full"],
        "attention": [attention],
    }


def combinations(options: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Each {name: one of its values}."""
    for values in itertools.product(*options.values()):
        yield dict(zip(options, values, strict=True))
