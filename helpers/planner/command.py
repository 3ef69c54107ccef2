"""``python -m helpers plan``: make a plan or a search for a model and a cluster, given by name or in a small file."""

import argparse
import json
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from helpers.command_line import positive_int
from helpers.planner import cluster as clusters
from helpers.planner import model as models
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.memory import SAFE_SHARE
from helpers.planner.plan import Job, plan
from helpers.planner.records import PlanError, Record, refuse
from helpers.planner.report import lines, search_tables, tables
from helpers.planner.search import search

RECORDS: dict[str, type[Record]] = {"layout": Layout, "job": Job, "conventions": Conventions}
TABLES = ("model", "cluster", *RECORDS)  # that a file may have
# Fields of a layout. If one of them is given, the layout is chosen and the command makes a plan; otherwise it searches.
SIZES_OF_MESH = ("dp", "tp", "pp", "cp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan`` to its parser."""
    model_help = f"a TOML file with {', '.join(TABLES)}; or a model's name"
    parser.add_argument("model", metavar="MODEL|FILE", help=model_help)
    presets = ", ".join(clusters.PRESETS)
    cluster_help = f"one of {presets}; or a TOML file: {clusters.Cluster.described()}"
    parser.add_argument("cluster", nargs="?", metavar="CLUSTER", help=cluster_help)
    gpus_help = "how many GPUs: of a named cluster, or to search for"
    parser.add_argument("--gpus", type=positive_int, default=0, metavar="N", help=gpus_help)
    sizes_help = f"fields of the model that win over the preset's: {models.Model.described()}"
    parser.add_argument("--sizes", default="", metavar="A=1,B=2", help=sizes_help)
    for name, record in RECORDS.items():
        record_help = f"they win over the file's: {record.described()}"
        parser.add_argument(f"--{name}", default="", metavar="A=1,B=2", help=record_help)
    share_help = f"the part of a GPU's memory that a search may fill, {SAFE_SHARE} unless given"
    parser.add_argument("--memory-share", type=float, default=SAFE_SHARE, metavar="SHARE", help=share_help)
    parser.add_argument("--json", action="store_true", help="numbers in base units instead of words")


def main(arguments: argparse.Namespace) -> int:
    """Print a plan or a search, and return the exit status: 1, with two lines on stderr, for what is not possible."""
    try:
        request = read_request(arguments)
        has_chosen_layout = any(size in request["layout"] for size in SIZES_OF_MESH)
        if has_chosen_layout:
            show_plan(request, arguments)
        else:
            show_search(request, arguments)
        return 0
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
    except ArithmeticError:
        print("error: a number is too large or too small to plan with.\nGive a real job's numbers.", file=sys.stderr)
    return 1


def show_plan(request: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print the plan of one layout, as words or as JSON. request: {table of TABLES: its fields}."""
    gpus = arguments.gpus
    if isinstance(request["cluster"], str) and gpus == 0:
        gpus = Layout.of(request["layout"]).gpus  # A preset has no number of GPUs of its own.
    cluster = clusters.cluster_of(request["cluster"], gpus)
    result = plan(request["model"], cluster, request["layout"], request["conventions"], request["job"])
    if arguments.json:
        print(json.dumps(tables(result), indent=1))
    else:
        print("\n".join(lines(result)))


def show_search(request: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Search for the fastest layout of a model on a cluster, and print the search as words or as JSON.

    request: {table of TABLES: its fields}. The fields of its layout are kept, and values of all other fields are tried.
    Raises PlanError if no layout fits.
    """
    cluster = clusters.cluster_of(request["cluster"], arguments.gpus)
    constraints = dict(request["layout"])
    batch = constraints.pop("batch", 0)
    if batch == 0:
        refuse("a search needs batch, the samples of a step", "--layout batch=1024, or sizes such as dp=8 for a plan")
    share = arguments.memory_share
    result = search(request["model"], cluster, batch, request["conventions"], share, **constraints)
    if not result.fits:
        raise result.error()
    if arguments.json:
        print(json.dumps(search_tables(result), indent=1))
    else:
        print("\n".join(result.explain()))


# --- Command line and files -------------------------------------------------------------------------------------------


def read_request(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read from the command line and its files what is to be planned: {table: fields} for each of TABLES.

    For example {"model": "llama3-8b", "cluster": "h100", "layout": {"dp": 8}, "job": {}, "conventions": {}}. A model
    and a cluster may be a preset's name instead of fields. The command line's fields win over a file's. Raises
    PlanError for what cannot be read.
    """
    request = read(arguments.model, "model", models.PRESETS)
    if arguments.cluster:
        tables_of_cluster_file = read(arguments.cluster, "cluster", clusters.PRESETS)
        request["cluster"] = tables_of_cluster_file.get("cluster")
    for name, record in RECORDS.items():
        table = request.get(name, {})
        if not isinstance(table, dict):
            raise PlanError(f"{name} is {table!r}.\nWrite it as a table: [{name}], then a line for each field.")
        option = getattr(arguments, name)  # such as "dp=8,zero=3" for --layout
        request[name] = {**table, **fields_of(option)}
        record.check_fields(request[name])
    for name in ("model", "cluster"):
        if request.get(name) is None:
            file = 'or a file with model = "llama3-8b", cluster = "h100", [layout] dp = 8'
            refuse(f"no {name} is given", f"both, as in plan llama3-8b h100, {file}")

    sizes = fields_of(arguments.sizes)
    if sizes:
        model = request["model"]
        if isinstance(model, str):
            model = {"preset": model}
        request["model"] = {**model, **sizes}
    return request


def read(text: str, what: str, presets: Iterable[str]) -> dict[str, Any]:
    """Read an argument of the command line: the tables of a TOML file, or {what: name} for the name of a preset.

    text: the argument. If it is a preset's name, no file is looked for. what: "model" or "cluster", which the argument
    should be. Raises PlanError if it is neither a preset nor a file, if the file is not TOML, or if the file has a
    table that the planner does not know.
    """
    if text in presets:
        return {what: text}
    path = Path(text)
    if not path.is_file():
        refuse(f"{text!r} is not a {what} that the planner knows, nor a file", f"a TOML file, or {', '.join(presets)}")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # It is not TOML, or not even text.
        raise PlanError(f"{path} is not TOML: {error}.\nCorrect that line.") from None
    for name in tables:
        if name not in TABLES:
            refuse(f"{path} has a table {name!r}", f"these tables: {', '.join(TABLES)}")
    return tables


def fields_of(text: str) -> dict[str, Any]:
    """Read an argument such as "dp=8,offload=true,recompute=full" as {name: value}.

    Numbers, true and false are read as in JSON, and anything else is a word. An empty text gives no fields. Raises
    PlanError for a part without a value.
    """
    fields: dict[str, Any] = {}
    for part in text.split(","):
        if not part:
            continue
        name, equals, value = part.partition("=")
        if not equals:
            raise PlanError(f"{part!r} has no value.\nWrite name=value, with commas between.")
        try:
            fields[name.strip()] = json.loads(value)
        except ValueError:
            fields[name.strip()] = value.strip()
    return fields
