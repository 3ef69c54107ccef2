"""``python -m helpers plan``: a model and a cluster, by name or in a small file, become a plan."""

import argparse
import json
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.command_line import positive_int
from helpers.planner import cluster as clusters
from helpers.planner import model as models
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.plan import MESH, Job, plan
from helpers.planner.records import PlanError, Record, refuse
from helpers.planner.report import lines, search_tables, tables
from helpers.planner.search import search

RECORDS: dict[str, type[Record]] = {"layout": Layout, "job": Job, "conventions": Conventions}
TABLES = ("model", "cluster", *RECORDS)


@dataclass(frozen=True)
class Request:
    """What a command line and its files ask for."""

    model: str | dict[str, Any]
    cluster: str | dict[str, Any]
    layout: dict[str, Any]
    job: dict[str, Any]
    conventions: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan`` to its parser."""
    parser.add_argument("model", metavar="MODEL|FILE", help=f"a TOML file with {', '.join(TABLES)}; or a model's name")
    presets = ", ".join(clusters.PRESETS)
    cluster_help = f"one of {presets}; or a TOML file: {clusters.Cluster.described()}"
    parser.add_argument("cluster", nargs="?", metavar="CLUSTER", help=cluster_help)
    parser.add_argument(
        "--gpus", type=positive_int, metavar="N", help="how many GPUs: of a named cluster, or to search for"
    )
    sizes_help = f"fields of the model that win over the preset's: {models.Model.described()}"
    parser.add_argument("--sizes", default="", metavar="A=1,B=2", help=sizes_help)
    for name, record in RECORDS.items():
        record_help = f"they win over the file's: {record.described()}"
        parser.add_argument(f"--{name}", default="", metavar="A=1,B=2", help=record_help)
    parser.add_argument("--search", action="store_true", help="rank all layouts for these GPUs and this batch")
    parser.add_argument("--json", action="store_true", help="numbers in base units instead of words")


def main(arguments: argparse.Namespace) -> int:
    """Print a plan or a search; return the exit status: 1 for what is not possible, with two lines on stderr."""
    try:
        request = read_request(arguments)
        names_ranks = any(name in request.layout for name in MESH)
        if arguments.search or not names_ranks:
            show_search(request, arguments)
        else:
            show_plan(request, arguments)
        return 0
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
    except ArithmeticError:
        print("error: a number is too large or too small to plan with.\nGive a real job's numbers.", file=sys.stderr)
    return 1


def show_plan(request: Request, arguments: argparse.Namespace) -> None:
    gpus = arguments.gpus or 0
    if isinstance(request.cluster, str) and gpus == 0:
        gpus = Layout.of(request.layout).gpus
    cluster = clusters.cluster_of(request.cluster, gpus)
    result = plan(request.model, cluster, request.layout, request.conventions, request.job)
    if arguments.json:
        print(json.dumps(tables(result), indent=1))
    else:
        print("\n".join(lines(result)))


def show_search(request: Request, arguments: argparse.Namespace) -> None:
    """Rank and print the layouts of a model on a cluster; fields that are given stay. PlanError where none fits."""
    if arguments.job:
        raise PlanError(
            "a search does not plan the --job.\nLeave it out, and plan again with the layout that you choose."
        )
    model = models.model_of(request.model)
    cluster = clusters.cluster_of(request.cluster, arguments.gpus or 0)
    constraints = dict(request.layout)
    batch = constraints.pop("batch", 0)
    if batch == 0:
        refuse("a search needs batch, the samples of a step", "--layout batch=1024, and sizes that are to stay")
    result = search(model, cluster, batch, request.conventions, **constraints)
    if arguments.json:
        print(json.dumps(search_tables(result), indent=1))
    else:
        print("\n".join(result.explain() if result.fits else [result.counts]))
        for rule, count in result.refusals.most_common(5):
            print(f"refused {count}: {rule}")
    if not result.fits:
        raise result.error()


# --- Command line and files -------------------------------------------------------------------------------------------


def read_request(arguments: argparse.Namespace) -> Request:
    """The Request of a command line; PlanError for a wrong one. The command line's fields win over the file's."""
    job = read(arguments.model, "model", models.PRESETS)
    if arguments.cluster:
        job["cluster"] = read(arguments.cluster, "cluster", clusters.PRESETS).get("cluster")
    for name, record in RECORDS.items():
        table = job.get(name, {})
        if not isinstance(table, dict):
            raise PlanError(f"{name} is {table!r}.\nWrite it as a table: [{name}], then a line for each field.")
        job[name] = {**table, **fields_of(getattr(arguments, name))}
        record.check_fields(job[name])
    for name in ("model", "cluster"):
        if job.get(name) is None:
            file = 'or a file with model = "llama3-8b", cluster = "h100", [layout] dp = 8'
            refuse(f"no {name} is given", f"both, as in plan llama3-8b h100, {file}")
    sizes = fields_of(arguments.sizes)
    if sizes:
        if isinstance(job["model"], str):
            job["model"] = {"preset": job["model"]}
        if isinstance(job["model"], dict):
            job["model"] = {**job["model"], **sizes}
    return Request(**job)


def read(text: str, what: str, presets: Iterable[str]) -> dict[str, Any]:
    """The tables of a TOML file, or {what: name} for the name of a preset, which is never taken for a file."""
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
    """{name: value} from "a=1,b=2": each a number, true, false or a word."""
    fields: dict[str, Any] = {}
    for part in text.split(","):
        if not part:
            continue
        name, _, value = part.partition("=")
        name = name.strip()
        value = value.strip()
        if not name or not value:
            missing = "value" if name else "name"
            raise PlanError(f"{part!r} has no {missing}.\nWrite name=value, with commas between.")
        if name in fields:
            refuse(f"{name} is given twice", "one value")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields
