"""The planner as a form: its inputs, and answers as HTML.

The book's page calls it when the book is built, and again in the browser, where Pyodide runs it.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from helpers.planner import cluster as clusters
from helpers.planner import model as models
from helpers.planner.cluster import Cluster
from helpers.planner.layout import Layout
from helpers.planner.model import Model
from helpers.planner.plan import plan
from helpers.planner.records import PlanError, refuse
from helpers.planner.report import as_argument, error_html, plan_html, search_html
from helpers.planner.search import searching


@dataclass(frozen=True)
class Input:
    """An input of the form. It takes one of its choices or, without choices, a whole number."""

    name: str  # such as "kv_heads", the field of the planner's record
    label: str  # what the form calls it, such as "key/value heads"
    value: str = ""  # its text at first; empty for the value of the preset
    choices: tuple[str, ...] = ()
    smallest: int = 1  # of a number


def choices_of(name: str) -> tuple[str, ...]:
    """The values that a field of Layout may have, as text. The field's type must be a Literal, which lists them."""
    values = get_args(Layout.__annotations__[name])
    return tuple(str(value) for value in values)


GROUPS: dict[str, tuple[Input, ...]] = {
    "Model": (
        Input("model", "preset", "llama3-8b", tuple(models.PRESETS)),
        Input("layers", "layers"),
        Input("width", "width"),
        Input("heads", "heads"),
        Input("kv_heads", "key/value heads"),
        Input("ffn", "MLP width"),
        Input("vocab", "vocabulary"),
        Input("experts", "experts"),
        Input("active_experts", "active experts"),
        Input("seq", "tokens a sample"),
    ),
    "Cluster and step": (
        Input("cluster", "GPU", "h100", tuple(clusters.PRESETS)),
        Input("gpus", "GPUs", "64"),
        Input("batch", "samples a step", "256"),
        Input("dtype", "precision", "bfloat16", ("bfloat16", "float8", "float16", "float32")),
    ),
    "Layout": (
        Input("zero", "ZeRO stage", "3", choices_of("zero")),
        Input("tp", "tensor parallel", "1"),
        Input("pp", "pipeline stages", "1"),
        Input("cp", "context parallel", "1"),
        Input("ep", "expert parallel", "1"),
        Input("micro_batch", "micro-batch", "1"),
        Input("shard", "HSDP shard (0: all)", "0", smallest=0),
        Input("interleave", "parts on a stage", "1"),
        Input("sequence_parallel", "sequence parallel", "false", ("false", "true")),
        Input("recompute", "recompute", "sac", choices_of("recompute")),
    ),
}
INPUTS = {entry.name: entry for group in GROUPS.values() for entry in group}
DEFAULTS = {name: entry.value for name, entry in INPUTS.items()}
# Names of inputs: fields of the model, and the two kinds of fields of a layout. A search for the fastest layout keeps
# those of the step and tries values of the others.
MODEL_SIZES = [entry.name for entry in GROUPS["Model"] if entry.name != "model"]
STEP_FIELDS = ["batch", "dtype"]
LAYOUT_FIELDS = [entry.name for entry in GROUPS["Layout"]]
# Earlier rankings, because the page asks for the same one again after each change of the layout:
# {(model, cluster, batch, dtype): the fastest layouts as HTML, some kilobytes}
cached_rankings: dict[tuple[Model, Cluster, int, str], str] = {}
MOST_CACHED_RANKINGS = 8


@dataclass(frozen=True)
class Question:
    """What the inputs ask for, as arguments of the planner."""

    model: Model
    cluster: Cluster
    layout: dict[str, Any]  # {field of a Layout: value}
    command: str  # the line for a terminal that prints the same plan


@dataclass(frozen=True)
class Answer:
    """What the form shows as the answer to its inputs."""

    html: str
    sizes: dict[str, int] = field(default_factory=dict)  # {field of the model: its value}, for inputs that are empty


def answer(values: Mapping[str, str]) -> Answer:
    """The plan for some inputs, {name: text}. Inputs that are not given have their defaults."""
    try:
        question = ask(values)
        result = plan(question.model, question.cluster, question.layout)
        sizes = {name: getattr(result.model, name) for name in MODEL_SIZES}
        return Answer(plan_html(result, question.command), sizes)
    except (PlanError, ArithmeticError) as error:
        return Answer(error_html(error))


def best(values: Mapping[str, str]) -> Answer:
    """The fastest layouts for a model, its GPUs and its batch. The inputs of the layout do not matter."""
    for result in ranking(values):
        if result is not None:
            return result
    raise AssertionError("a ranking ends with an answer")


def ranking(values: Mapping[str, str]) -> Iterator[Answer | None]:
    """Find what ``best`` returns in parts: yields None after each part, and in the end the answer.

    A ranking takes seconds in a browser, and a reader who changes an input meanwhile wants the new plan at once. So the
    page can do other work between two parts. The answer is empty if an input is wrong, because ``answer`` says so.
    """
    default_layout = {name: DEFAULTS[name] for name in LAYOUT_FIELDS}
    try:
        question = ask({**values, **default_layout})
    except PlanError:
        yield Answer("")
        return
    batch = question.layout["batch"]
    dtype = question.layout["dtype"]
    key = (question.model, question.cluster, batch, dtype)
    if key not in cached_rankings:
        try:
            for search_so_far in searching(question.model, question.cluster, batch, dtype=dtype):
                search = search_so_far
                yield None
            html = search_html(search)  # After the last part it is ranked.
        except (PlanError, ArithmeticError) as error:
            html = error_html(error)
        if len(cached_rankings) == MOST_CACHED_RANKINGS:
            oldest, *_ = cached_rankings  # A dictionary keeps the order in which keys were added.
            del cached_rankings[oldest]
        cached_rankings[key] = html
    yield Answer(cached_rankings[key])


def ask(given: Mapping[str, str]) -> Question:
    """Turn the texts of the form's inputs into a question for the planner.

    given: {name of an Input: its text}, such as {"model": "llama3-8b", "gpus": "64", "tp": "8"}. Inputs that are not
    given have their defaults, and names that are no inputs are ignored. dp is what tp, pp and cp leave of the GPUs.
    Raises PlanError for a wrong text, or if the layout does not divide the GPUs.
    """
    values = dict(DEFAULTS)
    for name, text in given.items():
        if name in INPUTS:
            values[name] = text.strip()

    model_sizes = {}  # {field: size} where the form differs from the preset
    for name in MODEL_SIZES:
        if values[name]:
            model_sizes[name] = whole_number(INPUTS[name], values[name])
    fields_of_layout = {}
    for name in (*LAYOUT_FIELDS, *STEP_FIELDS):
        fields_of_layout[name] = parsed(INPUTS[name], values[name])

    gpus = whole_number(INPUTS["gpus"], values["gpus"])
    ranks = fields_of_layout["tp"] * fields_of_layout["pp"] * fields_of_layout["cp"]
    if gpus % ranks != 0:
        hint = f"a multiple of {ranks} as GPUs, or less of one"
        refuse(f"{gpus} GPUs do not divide by tp x pp x cp = {ranks}", hint)
    layout = {"dp": gpus // ranks, **fields_of_layout}
    return Question(
        model=models.model_of({"preset": values["model"], **model_sizes}),
        cluster=clusters.cluster_of(values["cluster"], gpus),
        layout=layout,
        command=command_of(values, model_sizes, layout),
    )


def command_of(values: Mapping[str, str], model_sizes: dict[str, int], layout: dict[str, Any]) -> str:
    """The line for a terminal that prints the same plan as the form.

    For example "python -m helpers plan llama3-8b h100 --gpus=64 --layout=dp=8,tp=8". Fields of the layout that have
    their defaults are left out. dp is always there, because without any size of the mesh the command would search for a
    layout.
    """
    defaults = vars(Layout())
    layout_fields = {}
    for name, value in layout.items():
        if name == "dp" or value != defaults[name]:
            layout_fields[name] = value
    command = ["python", "-m", "helpers", "plan", values["model"], values["cluster"]]
    command.append(f"--gpus={values['gpus']}")
    if model_sizes:
        command.append(f"--sizes={as_argument(model_sizes)}")
    command.append(f"--layout={as_argument(layout_fields)}")
    return shlex.join(command)


def parsed(entry: Input, text: str) -> Any:
    """The value of an input's text, as a field of Layout has it: a number, True, False or a word."""
    if not entry.choices:
        return whole_number(entry, text)
    if text in ("true", "false") or text.isdecimal():
        return json.loads(text)
    return text


def whole_number(entry: Input, text: str) -> int:
    """Read an input's text as a whole number. Raises PlanError for another text, or for too small a number."""
    if not text.isdecimal() or int(text) < entry.smallest:
        refuse(f"{entry.label}: {text!r}", f"a whole number from {entry.smallest} on")
    return int(text)
