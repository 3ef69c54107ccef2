"""Published numbers, reproduced: a function for each quantity, and checks whether a row contradicts itself.

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

from helpers.planner.communication import share_sent
from helpers.planner.conventions import STATES, Conventions, States
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
UNITS = {"GB": 1e9, "GiB": 2**30, "": 1, "%": 0.01, "TF": 1e12, "GB/s": 1e9, "ms": 1e-3, "days": 1, "h": 1, "sbh": 1}


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
    """The MFU, or the HFU if ``recompute`` says what was recomputed."""
    return achieved(model, tokens_per_second, gpus, count, recompute) / peak


def days(
    tokens: float, gpus: int, tflops: float, model: Model | None = None, parameters: float = 0, recompute: str = "none"
) -> float:
    """Days of training on GPUs that each reach the speed ``tflops``, which is in FLOP/s here.

    FLOPs are counted from the model, or without one from the number of parameters P: 8TP for T tokens with full
    recomputation, 6TP without (Narayanan et al. 2021, equation 4).
    """
    if model:
        flops = model.flops_per_token("gemm", recompute) * tokens
    else:
        flops_per_parameter_and_token = 8 if recompute == "full" else 6
        flops = flops_per_parameter_and_token * parameters * tokens
    seconds = flops / (gpus * tflops)
    seconds_per_day = 86400
    return seconds / seconds_per_day


def busbw(collective: str, ranks: int, bytes: float, seconds: float) -> float:
    """The bus bandwidth, in bytes a second, as nccl-tests print it (doc/PERFORMANCE.md).

    collective: its name in the row, such as "all-reduce". bytes: the size of the whole tensor.
    """
    kind = collective.replace("-", "_")
    return bytes / seconds * share_sent(kind, ranks)


def parameters_of(model: Model) -> int:
    """How many parameters the model has."""
    return model.parameters()


def flops_per_token(model: Model) -> float:
    """FLOPs of the forward and the backward for one token, by the planner's default count."""
    return model.flops_per_token()


def all_gather_seconds(bytes: float, ranks: int, bandwidth: float) -> float:
    """Seconds of an all-gather of so many bytes, at a bandwidth in bytes a second."""
    return share_sent("all_gather", ranks) * bytes / bandwidth


def share_of_peak(tflops: float, peak: float) -> float:
    """The reached FLOP/s as a share of the peak's."""
    return tflops / peak


def mtbf_hours(failures: float, days: float) -> float:
    """Mean hours between failures, of which there were so many in so many days."""
    return 24 * days / failures


# {quantity of a row: the function that computes it}. The function's arguments are columns of the row.
QUANTITIES: dict[str, Callable[..., float]] = {
    "parameters": parameters_of,
    "FLOPs per token": flops_per_token,
    "states": states,
    "states difference": states_difference,
    "DeepSpeed's estimate": deepspeed,
    "activations a layer": activations_in_sbh,
    "activations": activations,
    "FLOP/s": achieved,
    "utilization": utilization,
    "share of peak": share_of_peak,
    "days": days,
    "bubble": bubble,
    "busbw": busbw,
    "all-gather": all_gather_seconds,
    "MTTF": mttf_hours,
    "MTBF": mtbf_hours,
}


# --- Rows that contradict themselves ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relation:
    """An equation between columns of a row: the product of the factors, divided by the divisor, is the result."""

    factors: tuple[str, ...]  # names of columns
    result: str
    divisor: str = ""
    exact: bool = False  # True for counts, which are not rounded

    @property
    def columns(self) -> list[str]:
        """The names of all columns in the equation."""
        return [column for column in (*self.factors, self.divisor, self.result) if column]

    @property
    def words(self) -> str:
        """The left side of the equation, as an error shows it: "batch x seq / seconds"."""
        product = " x ".join(self.factors)
        if self.divisor:
            return f"{product} / {self.divisor}"
        return product

    def tolerance(self, row: Mapping[str, Any]) -> Decimal:
        """How much the two sides may differ, relatively: by 1 %, and by half of each number's last published digit."""
        if self.exact:
            return Decimal(0)
        tolerance = Decimal("0.01")
        for column in self.columns:
            number = row[column]
            if isinstance(number, Decimal) and column != "peak":  # A data sheet's peak is not rounded.
                tolerance += half_unit(number) / number
        return tolerance


SHAPE = "the model's shape"  # a column that every row with a model gets: the parameters that follow from its shape
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
    """Say which numbers of a published row contradict each other by more than their rounding explains.

    row: {column: number}, such as {"tp": 8, "pp": 4, "dp": 2, "gpus": 128}. A number with a decimal point is a Decimal,
    because its last digit may be rounded. Each relation of RELATIONS whose columns the row has is checked; this row
    breaks tp x pp x cp x dp = gpus, so the result is ["tp x pp x cp x dp and gpus are 64 and 128"].
    """
    row = {"cp": 1, **row}  # Most rows have no context parallelism, and so no such column.
    if "model" in row:
        row[SHAPE] = model_of(row["model"]).parameters()
    problems = []
    for relation in RELATIONS:
        has_all_columns = all(row.get(column) for column in relation.columns)
        if not has_all_columns:
            continue
        computed = math.prod(Decimal(row[column]) for column in relation.factors)
        if relation.divisor:
            computed /= Decimal(row[relation.divisor])
        published = Decimal(row[relation.result])
        relative_difference = abs(computed / published - 1)
        if relative_difference > relation.tolerance(row):
            numbers = f"{float(computed):.6g} and {float(published):.6g}"
            problems.append(f"{relation.words} and {relation.result} are {numbers}")
    return problems


def half_unit(number: str | Decimal) -> Decimal:
    """By how much rounding may have changed a published number: half of one in its last digit.

    For example 0.05 for 31.4, and 0.5 for 144. The zero at the end of a whole number such as 400 may be a rounded
    digit, so for 400 it is 5.
    """
    number = Decimal(number)
    exponent = int(number.as_tuple().exponent)  # of the last digit: -1 for 31.4, 0 for 144
    is_whole = exponent >= 0
    last_digit_may_be_rounded = is_whole and number % 10 == 0
    if last_digit_may_be_rounded:
        exponent += 1
    five_in_the_next_digit = Decimal(5).scaleb(exponent - 1)
    return five_in_the_next_digit


# --- Reproducing a row ------------------------------------------------------------------------------------------------


class Reproduced(NamedTuple):
    """What the planner says of a published row."""

    value: float  # in the row's unit
    error: float  # relative to the published value


def reproduce(row: dict[str, str]) -> Reproduced:
    """Compute the number that a row of published.csv reports, and its relative error.

    A published number is usually rounded, so a difference of up to half a unit of its last digit counts as no error.
    Exact counts, such as a number of parameters, get no such tolerance. Raises PlanError for a row that contradicts
    itself.
    """
    refuse_contradictions(row["inputs"])
    computed = compute(row["quantity"], row["inputs"]) / UNITS[row["unit"]]
    published = float(row["published"])

    is_exact_count = row["target"] == "exact" and published.is_integer()
    if is_exact_count:
        tolerance = 0.0
    else:
        tolerance = float(half_unit(row["published"]))
    excess = max(abs(computed - published) - tolerance, 0)
    return Reproduced(computed, error=excess / abs(published))


def refuse_contradictions(inputs: str) -> None:
    """Raise PlanError if the inputs of a row contradict each other."""
    problems = contradictions(parse_inputs(inputs, number_type=Decimal))  # Decimal keeps the published digits
    if problems:
        text = "; ".join(problems)
        raise PlanError(f"the row contradicts itself: {text}.\nLook for a later version, or leave it out.")


def parse_inputs(inputs: str, number_type: Callable[[str], Any] = float) -> dict[str, Any]:
    """Read the inputs of a row: {"model": "gpt-22b", "batch": 4} of 'model = "gpt-22b", batch = 4'.

    They are the inside of an inline table of TOML. ``number_type`` makes a number of the text of a decimal fraction.
    """
    return tomllib.loads(f"row = {{{inputs}}}", parse_float=number_type)["row"]


def compute(quantity: str, inputs: str) -> float:
    """Compute a quantity, one of QUANTITIES, from the inputs of a row, in base units.

    A row may have more inputs than the quantity needs. These serve only to find contradictions.
    """
    function = look_up(QUANTITIES, quantity, "quantity")
    available = prepared(parse_inputs(inputs))
    needed = inspect.signature(function).parameters
    arguments = {name: value for name, value in available.items() if name in needed}
    return function(**arguments)


def prepared(inputs: dict[str, Any]) -> dict[str, Any]:
    """Turn the inputs of a published row into arguments of the function that computes its quantity.

    inputs: {column: value} as the row has them, such as {"model": "gpt-22b", "batch": 4, "seconds": 1.1, "gpus": 8}.
    The result has a Model as "model", a Layout as "layout", and the tokens a second of all GPUs. A row may give these
    as such, for each GPU, or as the seconds of a step with ``batch`` samples.
    """
    arguments = {"gpus": 1, **inputs}
    if "layout" in inputs:
        arguments["layout"] = Layout.of(inputs["layout"])
    if "model" in inputs:
        model = model_of(inputs["model"])
        arguments["model"] = model
        if "tokens_per_second_per_gpu" in inputs:
            arguments["tokens_per_second"] = inputs["tokens_per_second_per_gpu"] * arguments["gpus"]
        elif "seconds" in inputs:
            arguments["tokens_per_second"] = inputs["batch"] * model.seq / inputs["seconds"]
    return arguments


def rows_of(path: Path = ROWS) -> list[dict[str, str]]:
    """The rows of a CSV file; lines that begin with # are comments."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))
