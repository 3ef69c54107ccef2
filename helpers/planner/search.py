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
    largest: str  # the kind of memory that takes most there, such as "activations"

    @property
    def need(self) -> str:
        """A sentence of a search in which no layout fits, about the one that needs least memory."""
        size = f"{self.bytes / GIB:.1f} GiB"
        return f"The smallest, {self.layout.summary}, needs {size}, most of it {self.largest}."


@dataclass(frozen=True)
class Fit(Candidate):
    """A layout that fits, with its time."""

    step: StepTime

    @property
    def seconds(self) -> float:
        return self.step.seconds


@dataclass(frozen=True)
class Reason:
    """Why the search did not take another value of a field: a line about the best layout that has this value."""

    layout: Layout
    line: str


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

    def add_mesh(self, mesh: dict[str, int], settings: list[dict[str, Any]], batch: int) -> None:
        """Try the sizes of a mesh with each setting of the layout's other fields.

        mesh: {field: size}, for each field of MESH. settings: each {field: value}. What is wrong with the sizes alone
        is found once, and counted for all settings, because this takes most of a search's layouts out at once.
        """
        # Only stages can be interleaved.
        possible = [setting for setting in settings if mesh["pp"] > 1 or setting["interleave"] == 1]
        ranks = mesh["tp"] * mesh["pp"] * mesh["cp"]
        if self.cluster.gpus % ranks != 0:
            self.refusals["tp x pp x cp does not divide the GPUs"] += len(possible)
            return
        sizes: dict[str, Any] = {**mesh, "dp": self.cluster.gpus // ranks, "sequence_parallel": mesh["tp"] > 1}
        # A shard among all data-parallel ranks is what 0 stands for, so it is not tried twice.
        possible = [setting for setting in possible if setting["shard"] < sizes["dp"] * sizes["cp"]]
        may_be_uneven = any(setting.get("uneven_stages", False) for setting in settings)
        try:
            Layout(**sizes, uneven_stages=may_be_uneven).check(self.model, self.cluster)
        except PlanError as error:
            self.refusals[error.problem] += len(possible)
            return
        for setting in possible:
            self.add({"batch": batch, **sizes, **setting})

    def add(self, fields: dict[str, Any]) -> None:
        """Check a layout, and put it among those that are refused, too large or fit."""
        try:
            layout = Layout(**fields).check(self.model, self.cluster)
        except PlanError as error:
            self.refusals[error.problem] += 1
            return
        kinds = fullest_stage(self.model, layout, self.conventions)
        size = kinds["total"]
        parts = {kind: part for kind, part in kinds.items() if kind != "total"}
        largest = max(parts, key=lambda kind: parts[kind])
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
        """How many layouts were tried, and what became of them."""
        return (
            f"{self.tried} layouts of {self.model.name} on {self.cluster.gpus} x {self.cluster.gpu}: "
            f"{self.refusals.total()} refused, {len(self.too_large)} do not fit, {len(self.fits)} ranked."
        )

    @property
    def choice(self) -> str:
        """The fastest layout, its seconds and its memory."""
        best = self.best
        interval = f"{best.step.low:.2f} to {best.step.high:.2f}"
        time = f"{best.seconds:.2f} s a step ({interval})"
        memory = f"{best.bytes / GIB:.1f} of {self.cluster.memory / GIB:.1f} GiB"
        return f"Fastest: {best.layout.summary}: {time}, {memory}."

    @property
    def margin(self) -> str:
        """How many other layouts may be as fast, because their times differ by less than a prediction may be off."""
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
            commonest = max(self.refusals, key=lambda problem: self.refusals[problem])
            return f"None can be: {commonest}. Give other sizes or another --gpus{given}."
        options = "more GPUs, recompute = full or offload = true"
        return f"None fits in {self.cluster.memory / GIB:.1f} GiB. {self.too_large[0].need} Give {options}{given}."

    def reasons(self) -> list[str]:
        """Lines that say, field by field, why not the values next to the best layout's.

        One layout may be the reason for several fields. Then only the first line about it is given.
        """
        lines = []
        named = set()
        for name in EXPLAINED:
            for value in self.values_beside_the_best(name):
                reason = self.why_not(name, value)
                if reason.layout not in named:
                    named.add(reason.layout)
                    lines.append(reason.line)
        return lines

    def values_beside_the_best(self, name: str) -> list[Any]:
        """Of the values of a field that were tried, the next below and the next above that of the best layout.

        The values of recompute are words, which have no order, so all others of them are returned.
        """
        best = getattr(self.best.layout, name)
        values = {getattr(candidate.layout, name) for candidate in (*self.fits, *self.too_large)}
        if name == "recompute":
            return sorted(values - {best})
        beside = []
        below = [value for value in values if value < best]
        if below:
            beside.append(max(below))
        above = [value for value in values if value > best]
        if above:
            beside.append(min(above))
        return beside

    def why_not(self, name: str, value: Any) -> Reason:
        """Say why not the fastest layout in which a field has this value; if none fits, the smallest such layout."""
        question = f"Why not {name} = {value}?"
        best = self.best
        for fit in self.fits:  # the fastest first
            if getattr(fit.layout, name) == value:
                slower = f"{fit.seconds / best.seconds - 1:+.1%}"
                parts = differences(fit.step, best.step)
                return Reason(fit.layout, f"{question} {slower} with {fit.layout.summary}: {parts}.")
        for candidate in self.too_large:  # the smallest first
            if getattr(candidate.layout, name) == value:
                return Reason(candidate.layout, f"{question} {candidate.need}")
        raise ValueError(f"no layout with {name} = {value} was tried")


def differences(step: StepTime, best: StepTime) -> str:
    """Two parts of a step beside the same parts of the best layout's step, in words and seconds.

    They are the part that loses most and the one that saves most: "tensor parallel +1.20 s, data parallel -0.30 s".
    """
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
    """{kind: bytes} of the fullest rank, with "total" as their sum.

    To save time, only the first, second and last stage are compared, unless their numbers of layers differ.
    """
    stages = layout.typical_stages
    if layout.uneven_stages:
        stages = list(range(layout.pp))
    memories = [stage_memory(model, layout, conventions, stage) for stage in stages]
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
    options = values_to_try(model, cluster, batch, constraints)
    result = Search(model, cluster, Conventions.of(conventions or {}), tuple(constraints))

    sizes = {}
    other_fields = {}
    for name, values in options.items():
        if name in MESH:
            sizes[name] = values
        else:
            other_fields[name] = values
    # HSDP, a shard among fewer ranks than all, is tried with ZeRO-3 only.
    settings = [setting for setting in combinations(other_fields) if setting["zero"] == 3 or setting["shard"] == 0]
    for mesh in combinations(sizes):
        result.add_mesh(mesh, settings, batch)
    result.fits.sort(key=lambda fit: fit.step.rounded)
    result.too_large.sort(key=lambda candidate: candidate.bytes)
    return result


def values_to_try(model: Model, cluster: Cluster, batch: int, constraints: dict[str, Any]) -> dict[str, list[Any]]:
    """The values of each field that a search tries: the caller's, or else the default ones. {field: values}.

    Raises PlanError for a value that the field cannot have, so that it is refused once and not counted for each layout.
    """
    options = choices(model, cluster, constraints.get("attention", "flash"))
    for name, value in constraints.items():
        if isinstance(value, (list, tuple)):
            options[name] = list(value)
        else:
            options[name] = [value]
    for name, values in {**options, "batch": [batch]}.items():
        for value in values:
            Layout.check_fields({name: value})
    for dtype in options.get("dtype", []):
        cluster.peak(dtype)  # PlanError for a type that the GPU does not have
    return options


def choices(model: Model, cluster: Cluster, attention: str = "flash") -> dict[str, list[Any]]:
    """The values of each field that a search tries by default: {field: values}.

    Some of them never win. They are tried so that the search can say why not, as for tensor parallelism on two nodes.
    """
    node = cluster.gpus_per_node
    gpus = cluster.gpus
    powers_of_two = [2**power for power in range(gpus.bit_length())]
    cp_sizes = [1]
    if model.seq > 16384:  # Shorter samples fit on one rank.
        cp_sizes = [1, 2, 4, 8]
    ep_sizes = {1}
    if model.experts:
        ep_sizes |= {min(model.experts, node), model.experts}
    # Selective recomputation is of attention's scores, which only this attention stores.
    part_of_layer = "selective" if attention == "scores" else "sac"
    return {
        "tp": [size for size in powers_of_two if size <= 2 * node],
        "pp": [size for size in range(1, min(model.layers, gpus) + 1) if gpus % size == 0],
        "cp": cp_sizes,
        "ep": sorted(ep_sizes),
        "zero": [1, 3],
        "shard": [0, node],
        "micro_batch": [1, 2, 4, 8],
        "interleave": [1, 2, 4],
        "recompute": ["none", part_of_layer, "full"],
        "attention": [attention],
    }


def combinations(options: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Every way to choose one value for each name, from {name: values}: each as {name: value}."""
    for values in itertools.product(*options.values()):
        yield dict(zip(options, values, strict=True))
