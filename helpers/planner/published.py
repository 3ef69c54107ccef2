"""Published numbers, reproduced: one function for each quantity, and what shows that a row contradicts itself.

A row is a dict: what, quantity, inputs (the inside of a TOML table), published, unit, target and source, as in
book/recorded/published.csv.
"""

import csv
import tomllib
from decimal import Decimal, InvalidOperation
from pathlib import Path

from helpers.planner.communication import powersgd_numbers
from helpers.planner.conventions import GIGA, STATES
from helpers.planner.failures import mtbf_hours, mttf_hours
from helpers.planner.layout import layout_of
from helpers.planner.memory import activations_per_layer, deepspeed_estimate, stage_memory, states_per_rank
from helpers.planner.model import PlanError, known, model_of
from helpers.planner.rates import achieved, bubble, training_days

ROWS = Path(__file__).parents[2] / "book" / "recorded" / "published.csv"
TARGETS = {"exact": 0.0, "formula": 0.01, "memory": 0.08}
COLUMNS = ("what", "quantity", "inputs", "published", "unit", "target")
UNITS = {**GIGA, "": 1, "%": 0.01, "TF": 1e12, "GB/s": 1e9, "ms": 1e-3, "days": 1, "h": 1, "sbh": 1}


def parameters(model, active=False):
    return model_of(model).parameters(active)


def flops_per_token(model, count="6N+A", recompute="none"):
    return model_of(model).flops_per_token(count, recompute)


def states(parameters, ranks, zero, states="zero"):
    """Bytes on a rank of parameters, gradients and optimizer state."""
    return sum(states_per_rank(parameters, ranks, zero, known(STATES, states, "set of bytes a parameter")))


def states_difference(parameters, ranks, ranks_after, zero=3, states="float32"):
    """Bytes that a rank saves when more ranks share the states."""
    parts = known(STATES, states, "set of bytes a parameter")
    return sum(states_per_rank(parameters, ranks, zero, parts)) - sum(
        states_per_rank(parameters, ranks_after, zero, parts)
    )


def deepspeed(parameters, ranks, zero, largest=0, offload=""):
    return deepspeed_estimate(parameters, ranks, zero, largest, offload)


def activations_in_sbh(model, layout):
    """Bytes of a layer's activations in units of sequence · micro-batch · width."""
    model, layout = model_of(model), layout_of(layout)
    return activations_per_layer(model, layout) / (model.seq * layout.micro_batch * model.width)


def activations(model, layout):
    """Bytes of activations on the first stage, with the embedding's dropout."""
    from helpers.planner.conventions import Conventions

    found = stage_memory(model_of(model), layout_of(layout), Conventions(), 0)
    return found["activations"] + found.get("embedding's dropout", 0)


def rate(model, gpus, tokens_per_second=0, tokens_per_second_per_gpu=0, seconds=0, batch=0):
    """Tokens a second of all GPUs, however they were published."""
    if tokens_per_second_per_gpu:
        return tokens_per_second_per_gpu * gpus
    if seconds:
        return batch * model.seq / seconds
    return tokens_per_second


def tflops(model, gpus=1, count="6N+A", recompute="none", **measured):
    """FLOP/s of a GPU."""
    model = model_of(model)
    return achieved(model, rate(model, gpus, **measured), gpus, count, recompute)


def utilization(model, peak, gpus=1, count="6N+A", recompute="none", **measured):
    """MFU; HFU where recompute says what was recomputed."""
    return tflops(model, gpus, count, recompute, **measured) / peak


def share_of_peak(tflops, peak):
    return tflops / peak


def days(tokens, gpus, tflops, model=None, parameters=0, days="count", count="gemm", recompute="none"):
    if not model:  # equation 4 needs the number of parameters only
        return (8 if recompute == "full" else 6) * parameters * tokens / (gpus * tflops) / 86400
    return training_days(model_of(model), tokens, gpus, tflops, days, count, recompute)


def bubble_of(stages, micro_batches, interleave=1, relative_to="ideal"):
    return bubble(stages, micro_batches, interleave, relative_to)


def busbw(collective, ranks, bytes, seconds):
    """Bytes a second on the busiest link: bytes/s · 2(n-1)/n for an all-reduce, · (n-1)/n for the others that divide
    (nccl-tests, doc/PERFORMANCE.md)."""
    factors = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
    return bytes / seconds * known(factors, collective, "collective") * (ranks - 1) / ranks


def gather_seconds(bytes, ranks, bandwidth):
    """Seconds of an all-gather by a ring: (n-1)/n · bytes / bandwidth (Chan et al. 2007, section 4)."""
    return (ranks - 1) / ranks * bytes / bandwidth


QUANTITIES = {
    "PowerSGD": powersgd_numbers,
    "parameters": parameters,
    "FLOPs per token": flops_per_token,
    "states": states,
    "states difference": states_difference,
    "DeepSpeed's estimate": deepspeed,
    "activations a layer": activations_in_sbh,
    "activations": activations,
    "FLOP/s": tflops,
    "utilization": utilization,
    "share of peak": share_of_peak,
    "days": days,
    "bubble": bubble_of,
    "busbw": busbw,
    "all-gather": gather_seconds,
    "MTTF": mttf_hours,
    "MTBF": mtbf_hours,
}


def half_unit(number):
    """Half of the last digit that a number was published with: 0.05 for 31.4, 5 for 400."""
    number = Decimal(number)
    if number == number.to_integral_value() and number.as_tuple().exponent >= 0 and number % 10 == 0 and number:
        return 5 * Decimal(10) ** max(number.as_tuple().exponent, 0)
    return Decimal(10) ** number.as_tuple().exponent / 2


def columns_of(inputs):
    """The inputs as (floats for the functions, Decimals that remember their digits)."""
    text = f"row = {{{inputs}}}"
    try:
        numbers = tomllib.loads(text)["row"]
        return numbers, tomllib.loads(text, parse_float=Decimal)["row"]
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"inputs are not the inside of a TOML table: {error}.\nWrite a = 1, b = 'x'.") from None


def relations(row):
    """[(what, left, right)] that must be equal where a row has these columns; Decimals, in base units."""

    def have(*names):
        return all(row.get(name) for name in names)

    found = []
    if have("gpus", "tp", "pp", "dp"):
        product = row["tp"] * row["pp"] * row["dp"] * (row.get("cp") or 1)
        found.append(("tp x pp x cp x dp and gpus", product, row["gpus"]))
    if have("batch", "dp", "batch_per_dp"):
        found.append(("dp x batch_per_dp and batch", row["dp"] * row["batch_per_dp"], row["batch"]))
    if have("tokens_per_batch", "dp", "batch_per_dp", "seq"):
        tokens = row["dp"] * row["batch_per_dp"] * row["seq"]
        found.append(("dp x batch_per_dp x seq and tokens_per_batch", tokens, row["tokens_per_batch"]))
    if have("mfu", "tflops", "peak"):
        found.append(("tflops / peak and mfu", row["tflops"] / row["peak"], row["mfu"]))
    if have("aggregate", "gpus", "tflops"):
        found.append(("gpus x tflops and aggregate", row["gpus"] * row["tflops"], row["aggregate"]))
    elif have("aggregate", "gpus", "mfu", "peak"):
        total = row["gpus"] * row["mfu"] * row["peak"]
        found.append(("gpus x mfu x peak and aggregate", total, row["aggregate"]))
    if have("tokens_per_second", "batch", "seq", "seconds"):
        tokens = row["batch"] * row["seq"] / row["seconds"]
        found.append(("batch x seq / seconds and tokens_per_second", tokens, row["tokens_per_second"]))
    if have("days_published", "tokens", "tokens_per_second"):
        days = row["tokens"] / row["tokens_per_second"] / 86400
        found.append(("tokens / tokens_per_second and days_published", days, row["days_published"]))
    if have("parameters", "model"):
        found.append(("the model's shape and parameters", model_of(row["model"]).parameters(), row["parameters"]))
    return [(what, Decimal(left), Decimal(right)) for what, left, right in found]


def contradictions(row):
    """What disagrees in a row's own columns by more than 1 % and the digits that they were published with."""
    slack = Decimal("0.01") + sum(
        half_unit(value) / abs(Decimal(value))
        for name, value in row.items()
        if isinstance(value, Decimal) and value and name != "peak"
    )
    counts = {"gpus", "tp", "pp", "dp", "cp", "batch", "batch_per_dp", "seq"}
    found = []
    for what, left, right in relations(row):
        allowed = 0 if set(what.replace(" and ", " x ").split(" x ")) <= counts else slack
        if abs(left / right - 1) > allowed:
            found.append(f"{what} are {float(left):.6g} and {float(right):.6g}")
    return found


def check_row(inputs):
    """Raise a PlanError that names what disagrees."""
    if found := contradictions(inputs):
        raise PlanError(f"the row contradicts itself: {'; '.join(found)}.\nLook for a later version, or leave it out.")


def accepted(function, numbers):
    """Those inputs that the quantity takes; the others serve the check."""
    import inspect

    names = inspect.signature(function).parameters
    measured = {"tokens_per_second", "tokens_per_second_per_gpu", "seconds", "batch"} if "measured" in names else set()
    return {name: value for name, value in numbers.items() if name in names or name in measured}


def reproduce(row):
    """(computed, relative error) of a published row, in the row's unit; PlanError for one that contradicts itself.

    The error is to the nearest value that would be rounded to the published digits.
    """
    function = known(QUANTITIES, row["quantity"], "quantity")
    numbers, digits = columns_of(row["inputs"])
    unit = known(UNITS, row["unit"], "unit")
    try:
        published = Decimal(row["published"])
    except InvalidOperation:
        published = Decimal(0)
    if not published.is_finite() or not published:
        raise PlanError(f"the published value is {row['published']!r}.\nGive a number that is not 0.")
    try:
        check_row(digits)
        value = function(**accepted(function, numbers)) / unit
    except (TypeError, ArithmeticError) as error:
        hint = "Look at the row's inputs: one is missing, 0, or not a number."
        raise PlanError(f"{row['quantity']}: {error}.\n{hint}") from None
    if row["target"] == "exact" and published == published.to_integral_value():
        return value, abs(value - float(published)) / abs(float(published))
    missing = max(abs(value - float(published)) - float(half_unit(row["published"])), 0)
    return value, missing / abs(float(published))


def rows_of(path=ROWS):
    """The rows of a CSV file; lines that begin with # are comments."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    if not rows or any(row.get(name) is None for row in rows for name in COLUMNS):
        raise PlanError(
            f"{path} has {'a row without all columns' if rows else 'no rows'}.\nIts columns: {', '.join(COLUMNS)}."
        )
    return rows
