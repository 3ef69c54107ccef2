"""Published numbers, reproduced: one function for each quantity, and what shows that a row contradicts itself.

A row of book/recorded/published.csv has what, quantity, inputs (the inside of a TOML table), published, unit, target
(how near the planner must come) and source.
"""

import csv
import inspect
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from helpers.planner.communication import SENT
from helpers.planner.conventions import GIGA, STATES, Conventions, States
from helpers.planner.failures import mttf_hours
from helpers.planner.layout import Layout
from helpers.planner.memory import activations_per_layer, stage_memory, states_per_rank
from helpers.planner.model import Model, model_of
from helpers.planner.rates import achieved, bubble
from helpers.planner.records import PlanError, look_up

ROOT = Path(__file__).parents[3]  # of the repository
ROWS = ROOT / "book" / "recorded" / "published.csv"
TARGETS = {"exact": 0.0, "formula": 0.01, "memory": 0.08}  # {target of a row: the largest relative error}
# {unit of a row: its size in base units}. A speed in TF is FLOP/s, and sbh has no unit here (activations_in_sbh).
UNITS = {**GIGA, "": 1, "%": 0.01, "TF": 1e12, "GB/s": 1e9, "ms": 1e-3, "days": 1, "h": 1, "sbh": 1}


def states(parameters: float, ranks: int, zero: int, convention: States = "zero") -> float:
    """Bytes on a rank of parameters, gradients and optimizer state, if so many ranks divide them evenly.

    zero: the stage of ZeRO. convention: how many bytes of each there are for a parameter (see conventions.STATES).
    """
    shard = parameters / ranks
    kinds = states_per_rank(parameters, shard, zero, STATES[convention])
    return sum(kinds.values())


def states_difference(parameters: float, ranks: int, ranks_after: int) -> float:
    """Bytes that a rank saves when more ranks share the float32 states of FSDP."""
    before = states(parameters, ranks, zero=3, convention="float32")
    after = states(parameters, ranks_after, zero=3, convention="float32")
    return before - after


def deepspeed(parameters: float, ranks: int, offload: str = "") -> float:
    """Bytes on a GPU under ZeRO-2 by DeepSpeed's estimate, whose formula this is.

    The estimate is estimate_zero2_model_states_mem_needs of deepspeed/runtime/zero. Parameters and gradients have 2
    bytes each on every GPU, and the ranks share 16 bytes; with offload only the parameters are on the GPU.
    """
    if offload:
        return 2 * parameters
    return 4 * parameters + 16 * parameters / ranks


def activations(model: Model, layout: Layout) -> float:
    """Bytes of activations on the first stage, with the embedding's dropout."""
    kinds = stage_memory(model, layout, Conventions(), stage=0)
    return kinds["activations"] + kinds.get("embedding's dropout", 0)


def activations_in_sbh(model: Model, layout: Layout) -> float:
    """Bytes of a layer's activations in units of sequence · micro-batch · width."""
    return activations_per_layer(model, layout) / (model.seq * layout.micro_batch * model.width)


def utilization(
    model: Model, tokens_per_second: float, gpus: int, peak: float, count: str = "6N+A", recompute: str = "none"
) -> float:
    """MFU; HFU where recompute says what was recomputed."""
    return achieved(model, tokens_per_second, gpus, count, recompute) / peak


def days(
    tokens: float, gpus: int, tflops: float, model: Model | None = None, parameters: float = 0, recompute: str = "none"
) -> float:
    """Days of training on GPUs that each reach a speed, ``tflops`` in FLOP/s.

    FLOPs are counted from the model, or without one from the number of parameters P: 8TP for T tokens with full
    recomputation, 6TP without (Narayanan et al. 2021, equation 4).
    """
    if model:
        flops = model.flops_per_token("gemm", recompute) * tokens
    else:
        per_parameter_and_token = 8 if recompute == "full" else 6
        flops = per_parameter_and_token * parameters * tokens
    seconds = flops / (gpus * tflops)
    return seconds / 86400


def busbw(collective: str, ranks: int, bytes: float, seconds: float) -> float:
    """Bytes a second on the busiest link, as nccl-tests print it (doc/PERFORMANCE.md).

    collective: its name in the row, such as "all-reduce". bytes: the size of the whole tensor.
    """
    share_sent = look_up(SENT, collective.replace("-", "_"), "collective")
    return bytes / seconds * share_sent(ranks)


QUANTITIES: dict[str, Callable[..., float]] = {
    "parameters": lambda model: model.parameters(),
    "FLOPs per token": lambda model: model.flops_per_token(),
    "states": states,
    "states difference": states_difference,
    "DeepSpeed's estimate": deepspeed,
    "activations a layer": activations_in_sbh,
    "activations": activations,
    "FLOP/s": achieved,
    "utilization": utilization,
    "share of peak": lambda tflops, peak: tflops / peak,
    "days": days,
    "bubble": bubble,
    "busbw": busbw,
    "all-gather": lambda bytes, ranks, bandwidth: SENT["all_gather"](ranks) * bytes / bandwidth,
    "MTTF": mttf_hours,
    "MTBF": lambda failures, days: 24 * days / failures,
}


# --- Rows that contradict themselves ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relation:
    """What a row's columns must satisfy if it has all of these: the product of factors / divisor is the result."""

    factors: tuple[str, ...]
    result: str
    divisor: str = ""
    exact: bool = False  # for counts; other columns are rounded

    @property
    def columns(self) -> list[str]:
        """The names of all columns that it is about."""
        return [column for column in (*self.factors, self.divisor, self.result) if column]

    @property
    def words(self) -> str:
        """The left side of the equation, as an error shows it: "batch x seq / seconds"."""
        product = " x ".join(self.factors)
        if self.divisor:
            return f"{product} / {self.divisor}"
        return product

    def tolerance(self, row: Mapping[str, Any]) -> Decimal:
        """The relative difference that a row may have: 1 %, and half of the last published digit of each number."""
        if self.exact:
            return Decimal(0)
        tolerance = Decimal("0.01")
        for column in self.columns:
            number = row[column]
            if isinstance(number, Decimal) and column != "peak":  # A data sheet's peak is not rounded.
                tolerance += half_unit(number) / number
        return tolerance


SHAPE = "the model's shape"  # the parameters that it makes, a column that every row with a model gets
RELATIONS = (
    Relation(("tp", "pp", "cp", "dp"), "gpus", exact=True),
    Relation(("dp", "batch_per_dp"), "batch", exact=True),
    Relation(("dp", "batch_per_dp", "seq"), "tokens_per_batch"),
    Relation(("tflops",), "mfu", divisor="peak"),
    Relation(("gpus", "tflops"), "aggregate"),
    Relation(("gpus", "mfu", "peak"), "aggregate"),
    Relation(("batch", "seq"), "tokens_per_second", divisor="seconds"),
    Relation((SHAPE,), "parameters"),
)


def contradictions(row: dict[str, Any]) -> list[str]:
    """Say in a line each which of a row's columns disagree by more than their rounding explains.

    row: {column: number}; those with a decimal point as Decimal, because their last digit may be rounded.
    """
    row = {"cp": 1, **row}  # Most rows have no context parallelism, and so no such column.
    if "model" in row:
        row[SHAPE] = model_of(row["model"]).parameters()
    wrong = []
    for relation in RELATIONS:
        has_all_columns = all(row.get(column) for column in relation.columns)
        if not has_all_columns:
            continue
        left = math.prod(Decimal(row[column]) for column in relation.factors)
        if relation.divisor:
            left /= Decimal(row[relation.divisor])
        right = Decimal(row[relation.result])
        relative_difference = abs(left / right - 1)
        if relative_difference > relation.tolerance(row):
            wrong.append(f"{relation.words} and {relation.result} are {float(left):.6g} and {float(right):.6g}")
    return wrong


def half_unit(number: str | Decimal) -> Decimal:
    """Half of one in the last digit that a number was published with: 0.05 for 31.4, 0.5 for 144, 5 for 400.

    So much may have been lost by rounding. Of a whole number that ends with a zero, the zero may be a rounded digit,
    so this is half of ten.
    """
    number = Decimal(number)
    exponent = int(number.as_tuple().exponent)  # -1 for 31.4, 0 for 144
    last_digit_may_be_rounded = exponent >= 0 and number % 10 == 0
    if not last_digit_may_be_rounded:
        exponent -= 1
    return Decimal(5).scaleb(exponent)


# --- Reproducing a row ------------------------------------------------------------------------------------------------


class Reproduced(NamedTuple):
    """What the planner says of a published row."""

    value: float  # in the row's unit
    error: float  # relative to the published value


def reproduce(row: dict[str, str]) -> Reproduced:
    """Compute what a row of published.csv was published for, and how far it is from that.

    The error is to the nearest value that would be rounded to the published digits; for an exact count, to the count.
    Raises PlanError for a row that contradicts itself.
    """
    text = f"row = {{{row['inputs']}}}"
    wrong = contradictions(tomllib.loads(text, parse_float=Decimal)["row"])
    if wrong:
        raise PlanError(f"the row contradicts itself: {'; '.join(wrong)}.\nLook for a later version, or leave it out.")
    inputs = prepared(tomllib.loads(text)["row"])
    quantity = look_up(QUANTITIES, row["quantity"], "quantity")
    # A row may have more columns than the quantity takes; those are there to contradict it.
    arguments = {name: inputs[name] for name in inspect.signature(quantity).parameters if name in inputs}
    value = quantity(**arguments) / UNITS[row["unit"]]

    published = float(row["published"])
    distance = abs(value - published)
    is_exact_count = row["target"] == "exact" and published.is_integer()
    if not is_exact_count:
        lost_by_rounding = float(half_unit(row["published"]))
        distance = max(distance - lost_by_rounding, 0)
    return Reproduced(value, error=distance / abs(published))


def prepared(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a row as its quantity takes them: with a Model, a Layout, and the tokens a second of all GPUs.

    A row may give its speed for all GPUs, for each GPU, or as the seconds of a step with so many samples as ``batch``.
    """
    inputs = {"gpus": 1, **inputs}
    if "layout" in inputs:
        inputs["layout"] = Layout.of(inputs["layout"])
    if "model" in inputs:
        inputs["model"] = model_of(inputs["model"])
        if "tokens_per_second_per_gpu" in inputs:
            inputs["tokens_per_second"] = inputs["tokens_per_second_per_gpu"] * inputs["gpus"]
        elif "seconds" in inputs:
            inputs["tokens_per_second"] = inputs["batch"] * inputs["model"].seq / inputs["seconds"]
    return inputs


def rows_of(path: Path = ROWS) -> list[dict[str, str]]:
    """The rows of a CSV file; lines that begin with # are comments."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))
