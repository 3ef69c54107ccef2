"""All layouts of a model on a cluster: which are refused and why, which do not fit, and the rest by step time."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from helpers.planner.cluster import Cluster
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.memory import SAFE_SHARE, stage_memory
from helpers.planner.model import Model, model_of
from helpers.planner.records import PlanError, refuse
from helpers.planner.step_time import INTERVAL_FACTOR, StepTime, step_time

# Fields of a layout: the sizes of the mesh that are tried (dp follows from them), and those whose values are explained.
MESH = ("tp", "pp", "cp", "ep")
EXPLAINED = (*MESH, "zero", "shard", "micro_batch", "interleave", "recompute")
LONG_SAMPLE = 16384  # tokens: up to these, a sample fits on one rank, so context parallelism is not tried
GIB = 2**30


@dataclass(frozen=True)
class Candidate:
    """A layout that is possible, and what its fullest rank needs."""

    layout: Layout
    bytes: float  # that the rank needs
    largest: str  # the kind of memory that takes most of them, such as "activations"

    @property
    def need(self) -> str:
        """A sentence about this layout if it is the smallest one and does not fit."""
        size = f"{self.bytes / GIB:.1f} GiB"
        return f"The smallest, {self.layout.summary}, needs {size}, most of it {self.largest}."


@dataclass(frozen=True)
class Fit(Candidate):
    """A layout that fits, with the predicted time of a step."""

    step: StepTime

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        return self.step.seconds


@dataclass(frozen=True)
class Reason:
    """Why the search did not choose another value of a field: a line about the best layout that has this value."""

    layout: Layout
    line: str


@dataclass
class Search:
    """The layouts of a model on a cluster, and what became of each."""

    # What is searched.
    model: Model
    cluster: Cluster
    conventions: Conventions
    memory_share: float = SAFE_SHARE  # the share of a GPU's memory that a layout may need
    constraints: tuple[str, ...] = ()  # names of the layout's fields that the caller chose
    # What was found.
    fits: list[Fit] = field(default_factory=list)  # the fastest first
    too_large: list[Candidate] = field(default_factory=list)  # the smallest first
    refusals: Counter[str] = field(default_factory=Counter)  # {what is wrong: how many layouts are refused for it}

    def add_mesh(self, mesh: dict[str, int], settings: list[dict[str, Any]], batch: int) -> None:
        """Try all layouts that have these mesh sizes, one for each entry of ``settings``.

        mesh: {field: size} for each field of MESH, such as {"tp": 8, "pp": 1, "cp": 1, "ep": 1}. settings: the values
        of a layout's other fields, such as [{"zero": 3, "micro_batch": 2, …}, …]. batch: samples of a step.

        The sizes are checked first, once for all settings, because most layouts of a search fail there.
        """
        if mesh["pp"] == 1:  # interleaving needs pipeline stages
            settings = [setting for setting in settings if setting["interleave"] == 1]
        ranks_of_copy = mesh["tp"] * mesh["pp"] * mesh["cp"]
        if self.cluster.gpus % ranks_of_copy != 0:
            self.refusals["tp x pp x cp does not divide the GPUs"] += len(settings)
            return
        dp = self.cluster.gpus // ranks_of_copy
        sizes: dict[str, Any] = {**mesh, "dp": dp, "sequence_parallel": mesh["tp"] > 1}

        # "shard" is the number of ranks over which the states are sharded, and 0 means all data_ranks. So a shard equal
        # to data_ranks duplicates 0, and a larger one is invalid.
        data_ranks = dp * mesh["cp"]
        settings = [setting for setting in settings if setting["shard"] < data_ranks]

        problem = self.problem_of_sizes(sizes, settings)
        if problem:
            self.refusals[problem] += len(settings)
            return
        for setting in settings:
            self.try_layout({"batch": batch, **sizes, **setting})

    def problem_of_sizes(self, sizes: dict[str, Any], settings: list[dict[str, Any]]) -> str:
        """Why no layout can have these sizes, whatever its other settings are; empty if one may have them."""
        may_be_uneven = any(setting.get("uneven_stages", False) for setting in settings)  # this allows more sizes
        try:
            Layout(**sizes, uneven_stages=may_be_uneven).check(self.model, self.cluster)
        except PlanError as error:
            return error.problem
        return ""

    def try_layout(self, fields: dict[str, Any]) -> None:
        """Try one layout, and add it to ``fits`` or to ``too_large``, or count it in ``refusals``.

        ``fields`` are those of a Layout, such as {"batch": 512, "tp": 8, "pp": 1, "zero": 3, …}. A layout is refused if
        it is impossible. It is too large if its fullest rank needs more than ``memory_limit``. If it fits, the seconds
        of a step are predicted, too.
        """
        try:
            layout = Layout(**fields).check(self.model, self.cluster)
        except PlanError as error:
            self.refusals[error.problem] += 1
            return
        bytes_of_kind = memory_of_fullest_stage(self.model, layout, self.conventions)
        total = bytes_of_kind["total"]
        kinds = [kind for kind in bytes_of_kind if kind != "total"]
        largest_kind = max(kinds, key=lambda kind: bytes_of_kind[kind])  # such as "activations"
        if total > self.memory_limit:
            self.too_large.append(Candidate(layout, total, largest_kind))
        else:
            step = step_time(self.model, layout, self.cluster, self.conventions)
            self.fits.append(Fit(layout, total, largest_kind, step))

    @property
    def memory_limit(self) -> float:
        """Bytes that the fullest rank of a layout may need."""
        return self.memory_share * self.cluster.memory

    @property
    def best(self) -> Fit:
        """The layout with the fewest predicted seconds. Raises PlanError if none fits."""
        if not self.fits:
            raise self.error()
        return self.fits[0]

    def error(self) -> PlanError:
        """The PlanError of a search in which no layout fits."""
        if self.too_large:
            problem = f"no layout of {self.model.name} fits"
        else:
            problem = f"no layout of {self.model.name} can be"
        return PlanError(f"{problem}.\n{self.advice}")

    @property
    def tried(self) -> int:
        """How many layouts were tried."""
        return len(self.fits) + len(self.too_large) + self.refusals.total()

    # --- The search in words ---

    def explain(self) -> list[str]:
        """The search in lines: the counts, the choice, why not another one, and how many others are as fast."""
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
        seconds = f"{best.seconds:.2f} s a step ({best.step.low:.2f} to {best.step.high:.2f})"
        share_of_memory = best.bytes / self.cluster.memory
        return (
            f"Fastest: {best.layout.summary}: {seconds}, {best.bytes / GIB:.1f} GiB "
            f"({share_of_memory:.0%} of the GPU, and {self.memory_share:.0%} is the limit of a plan)."
        )

    @property
    def margin(self) -> str:
        """How many other layouts may be as fast, because a prediction may be off by more than their times differ."""
        close = [fit for fit in self.fits[1:] if fit.seconds <= self.best.seconds * INTERVAL_FACTOR]
        interval = f"within a factor of {INTERVAL_FACTOR} of it, which a prediction may be off"
        return f"{len(close)} more {interval}: measure a few."

    @property
    def advice(self) -> str:
        """Why no layout fits, and what to try: the second line of the error of such a search."""
        given = ""
        given_fields = [name for name in self.constraints if name in EXPLAINED]
        if given_fields:
            given = f", or leave out what is given: {', '.join(given_fields)}"
        if not self.too_large:
            commonest_problem = max(self.refusals, key=lambda problem: self.refusals[problem])
            return f"None can be: {commonest_problem}. Give other sizes or another --gpus{given}."
        options = "more GPUs, recompute = full or offload = true"
        memory = f"{self.memory_share:.0%} of {self.cluster.memory / GIB:.1f} GiB"
        smallest = self.too_large[0]
        return f"None fits in {memory}. {smallest.need} Give {options}{given}."

    def reasons(self) -> list[str]:
        """Sentences that say, field by field, why the values next to those of the best layout are worse.

        For example "Why not tp = 4? +12.0% with dp 16, tp 4, zero 3, micro-batch 1: tensor parallel +0.31 s." If a
        layout is the reason for several fields, only the first sentence about it is given.
        """
        sentences = []
        mentioned: set[Layout] = set()
        for name in EXPLAINED:
            for value in self.values_beside_the_best(name):
                reason = self.why_not(name, value)
                if reason.layout not in mentioned:
                    mentioned.add(reason.layout)
                    sentences.append(reason.line)
        return sentences

    def values_beside_the_best(self, name: str) -> list[Any]:
        """Of the values that were tried for a field, those next to the best layout's value.

        These are the next smaller one and the next larger one, as far as they exist. The values of recompute are words,
        which have no order, so all others of them are returned.
        """
        best_value = getattr(self.best.layout, name)
        tried_values = {getattr(candidate.layout, name) for candidate in (*self.fits, *self.too_large)}
        if name == "recompute":
            return sorted(tried_values - {best_value})
        neighbours = []
        smaller = [value for value in tried_values if value < best_value]
        if smaller:
            neighbours.append(max(smaller))
        larger = [value for value in tried_values if value > best_value]
        if larger:
            neighbours.append(min(larger))
        return neighbours

    def why_not(self, name: str, value: Any) -> Reason:
        """Say why the search did not choose a layout in which a field has this value.

        The reason is how much slower the fastest of these layouts is, and in what. If none of them fits, it is how much
        memory the smallest needs. A layout with this value must have been tried.
        """
        question = f"Why not {name} = {value}?"
        for fit in self.fits:  # the fastest first
            if getattr(fit.layout, name) == value:
                slower = f"{fit.seconds / self.best.seconds - 1:+.1%}"
                parts = differences(fit.step, self.best.step)
                return Reason(fit.layout, f"{question} {slower} with {fit.layout.summary}: {parts}.")
        for candidate in self.too_large:  # the smallest first
            if getattr(candidate.layout, name) == value:
                return Reason(candidate.layout, f"{question} {candidate.need}")
        raise ValueError(f"no layout with {name} = {value} was tried")


def differences(step: StepTime, best: StepTime) -> str:
    """The two parts in which a step differs most from the best layout's step, in words.

    They are the part that loses most and the one that saves most: "tensor parallel +1.20 s, data parallel -0.30 s".
    """
    seconds_more = {part: step.parts[part] - seconds for part, seconds in best.parts.items()}
    loses_most = max(seconds_more, key=lambda part: seconds_more[part])
    saves_most = min(seconds_more, key=lambda part: seconds_more[part])
    texts = []
    for part in (loses_most, saves_most):
        would_be_printed_as_zero = abs(seconds_more[part]) < 0.005
        if not would_be_printed_as_zero:
            texts.append(f"{part} {seconds_more[part]:+.2f} s")
    if not texts:
        return "much the same"
    return ", ".join(texts)


def memory_of_fullest_stage(model: Model, layout: Layout, conventions: Conventions) -> dict[str, float]:
    """{kind: bytes} that a rank of the fullest pipeline stage needs, such as "activations", and their sum as "total".

    To save time, only the first, second and last stage are compared, unless the stages' numbers of layers differ.
    """
    if layout.uneven_stages:
        stages = list(range(layout.pp))
    else:
        stages = layout.typical_stages
    memories = [stage_memory(model, layout, conventions, stage) for stage in stages]
    return max(memories, key=lambda bytes_of_kind: bytes_of_kind["total"])


def search(
    model: str | dict[str, Any] | Model,
    cluster: Cluster,
    batch: int,
    conventions: dict[str, Any] | Conventions | None = None,
    memory_share: float = SAFE_SHARE,
    **constraints: Any,
) -> Search:
    """Try all layouts of a model on a cluster, with ``batch`` samples in a step, and rank those that fit.

    constraints: fields of a Layout that are given: a value to keep, such as tp=8, or a list of values to try instead of
    the default ones, such as tp=[4, 8]. Tensor parallelism comes with sequence parallelism, unless that is given.
    memory_share: how much of a GPU's memory a layout may need, in 0..1. Real jobs need up to 18 % more than is
    planned, so a search that may fill all of it can recommend a layout that runs out of memory.
    """
    # All parts give the same Search, which is ranked after the last one.
    parts = list(searching(model, cluster, batch, conventions, memory_share, **constraints))
    return parts[-1]


def searching(
    model: str | dict[str, Any] | Model,
    cluster: Cluster,
    batch: int,
    conventions: dict[str, Any] | Conventions | None = None,
    memory_share: float = SAFE_SHARE,
    **constraints: Any,
) -> Iterator[Search]:
    """Do the work of ``search`` in parts, and yield the same Search after each. It is ranked after the last one.

    So a page that shows the result can answer something else between two parts, or give up the search.
    """
    if not 0 < memory_share <= 1:
        refuse(f"memory_share = {memory_share} is not a share of a GPU's memory", "more than 0 and at most 1")
    model = model_of(model)
    options = values_to_try(model, cluster, batch, constraints)
    result = Search(model, cluster, Conventions.of(conventions or {}), memory_share, tuple(constraints))

    mesh_options = {}
    other_options = {}
    for name, values in options.items():
        if name in MESH:
            mesh_options[name] = values
        else:
            other_options[name] = values
    settings = []
    for setting in combinations(other_options):
        is_hsdp = setting["shard"] != 0  # a shard among fewer ranks than all
        if setting["zero"] == 3 or not is_hsdp:
            settings.append(setting)
    for mesh in combinations(mesh_options):
        result.add_mesh(mesh, settings, batch)
        yield result
    result.fits.sort(key=lambda fit: fit.step.rounded)
    result.too_large.sort(key=lambda candidate: candidate.bytes)
    yield result


def values_to_try(model: Model, cluster: Cluster, batch: int, constraints: dict[str, Any]) -> dict[str, list[Any]]:
    """{field of a layout: the values that a search tries}: the default ones, or the caller's ``constraints``.

    A constraint is a value or a list of values. Raises PlanError for a value that the field cannot have: that is an
    error of the caller, and no reason to refuse layout after layout.
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
        cluster.peak(dtype)  # It raises PlanError for a type that the GPU does not have.
    return options


def choices(model: Model, cluster: Cluster, attention: str = "flash") -> dict[str, list[Any]]:
    """The values that a search tries by default for each field of a layout, such as {"tp": [1, 2, 4, 8], …}.

    The fields are the sizes of tensor, pipeline, context and expert parallelism (tp, pp, cp, ep), the stage of ZeRO
    (zero: 3 shards the weights), how many ranks share the shards (shard: 0 is all), samples in a micro-batch, model
    chunks on a rank of the pipeline (interleave), and what is recomputed: "sac" is selective activation checkpointing.

    Some values never win, such as tensor parallelism on two nodes. They are tried so that the search can say why not.
    """
    node = cluster.gpus_per_node
    gpus = cluster.gpus
    powers_of_two = [2**power for power in range(gpus.bit_length())]
    if model.seq > LONG_SAMPLE:
        cp_sizes = [1, 2, 4, 8]
    else:
        cp_sizes = [1]
    ep_sizes = {1}
    if model.experts:
        ep_sizes.add(min(model.experts, node))
        ep_sizes.add(model.experts)
    if attention == "scores":
        recompute_in_part = "selective"  # The stored scores of attention are recomputed.
    else:
        recompute_in_part = "sac"
    return {
        "tp": [size for size in powers_of_two if size <= 2 * node],
        "pp": [size for size in range(1, min(model.layers, gpus) + 1) if gpus % size == 0],
        "cp": cp_sizes,
        "ep": sorted(ep_sizes),
        "zero": [1, 3],
        "shard": [0, node],
        "micro_batch": [1, 2, 4, 8],
        "interleave": [1, 2, 4],
        "recompute": ["none", recompute_in_part, "full"],
        "attention": [attention],
    }


def combinations(options: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Yields every way to choose one value for each name, as {name: value}. options: {name: values}."""
    for values in itertools.product(*options.values()):
        yield dict(zip(options, values, strict=True))
