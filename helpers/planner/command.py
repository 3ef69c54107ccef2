"""``python -m helpers plan``: a model and a cluster, by name or in a small file, become a plan."""

import argparse
import json
import sys
import tomllib
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

FIELDS: dict[str, type[Record]] = {"layout": Layout, "job": Job, "conventions": Conventions}
TABLES = ("model", "cluster", *FIELDS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan`` to its parser."""
    parser.add_argument("model", metavar="MODEL|FILE", help=f"a TOML file with {', '.join(TABLES)}; or a model's name")
    names, described = ", ".join(clusters.PRESETS), clusters.Cluster.described()
    parser.add_argument("cluster", nargs="?", metavar="CLUSTER", help=f"one of {names}; or a TOML file: {described}")
    parser.add_argument(
        "--gpus", type=positive_int, metavar="N", help="how many GPUs: of a named cluster, or to search for"
    )
    sizes = f"fields of the model that win over the preset's: {models.Model.described()}"
    parser.add_argument("--sizes", metavar="A=1,B=2", help=sizes)
    for name, record in FIELDS.items():
        parser.add_argument(f"--{name}", metavar="A=1,B=2", help=f"they win over the file's: {record.described()}")
    parser.add_argument("--search", action="store_true", help="rank all layouts for these GPUs and this batch")
    parser.add_argument("--json", action="store_true", help="numbers in base units instead of words")


def main(arguments: argparse.Namespace) -> int:
    """Carry ``plan`` out; return the exit status: 1 for a plan that cannot be, with a line or two on stderr."""
    try:
        job = read_job(arguments)
        if arguments.search or not job["layout"].keys() & set(MESH):
            show_search(arguments, job)
        else:
            show_plan(arguments, job)
        return 0
    except (PlanError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except ArithmeticError:
        print("error: a number is too large or too small to plan with.\nGive a real job's numbers.", file=sys.stderr)
    return 1


def fields_of(text: str) -> dict[str, Any]:
    """{name: value} from "a=1,b=2": each a number, true, false or a word."""
    table: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = (word.strip() for word in part.partition("="))
        if not name or not value:
            raise PlanError(f"{part!r} has no {'value' if name else 'name'}.\nWrite name=value, with commas between.")
        if name in table:
            refuse(f"{name} is given twice", "one value")
        try:
            table[name] = json.loads(value)
        except ValueError:
            table[name] = value
    return table


def read(text: str, what: str, names: dict[str, Any]) -> dict[str, Any]:
    """The tables of a TOML file; or {what: a name}: one that the planner knows is never a file."""
    path = Path(text)
    if text in names or not (text.endswith(".toml") or path.is_file()):
        return {what: text}
    try:
        job = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        refuse(f"{path}: {error.strerror}", f"a TOML file, or a {what}: {', '.join(names)}")
    except ValueError as error:  # it is not TOML, or not even text
        raise PlanError(f"{path} is not TOML: {error}.\nMend that line.") from None
    if unknown := [name for name in job if name not in TABLES]:
        refuse(f"{path} has a table {unknown[0]!r}", f"these tables: {', '.join(TABLES)}")
    return job


def read_job(arguments: argparse.Namespace) -> dict[str, Any]:
    """{table: its fields} of a command line and its files."""
    job = read(arguments.model, "model", models.PRESETS)
    if arguments.cluster:
        job["cluster"] = read(arguments.cluster, "cluster", clusters.PRESETS).get("cluster")
    for name in FIELDS:
        table = job.get(name, {})
        if not isinstance(table, dict):
            raise PlanError(f"{name} is {table!r}.\nWrite it as a table: [{name}], then a line for each field.")
        job[name] = {**table, **fields_of(getattr(arguments, name) or "")}
    sizes = fields_of(arguments.sizes or "")
    if sizes and job.get("model"):
        model = job["model"]
        job["model"] = {**({"preset": model} if isinstance(model, str) else model), **sizes}
    for name in ("model", "cluster"):
        if job.get(name) is None:
            file = 'or a file with model = "llama3-8b", cluster = "h100", [layout] dp = 8'
            refuse(f"no {name} is given", f"both, as in plan llama3-8b h100, {file}")
    return job


def show_plan(arguments: argparse.Namespace, job: dict[str, Any]) -> None:
    cluster, gpus = job["cluster"], arguments.gpus
    if isinstance(cluster, str) and not gpus:  # as many as the layout has
        gpus = Layout.of(job["layout"]).gpus
    result = plan(job["model"], clusters.cluster_of(cluster, gpus or 0), job["layout"], job["conventions"], job["job"])
    print(json.dumps(tables(result), indent=1) if arguments.json else "\n".join(lines(result)))


def show_search(arguments: argparse.Namespace, job: dict[str, Any]) -> None:
    """Rank and print the layouts of a model on a cluster; fields that are given stay. PlanError where none fits."""
    model, cluster = models.model_of(job["model"]), clusters.cluster_of(job["cluster"], arguments.gpus or 0)
    if arguments.job:
        raise PlanError(
            "a search does not plan the --job.\nLeave it out, and plan again with the layout that you choose."
        )
    constraints = dict(job["layout"])
    batch = constraints.pop("batch", 0)
    if not batch:
        refuse("a search needs batch, the samples of a step", "--layout batch=1024, and sizes that are to stay")
    result = search(model, cluster, batch, job["conventions"], **constraints)
    if arguments.json:
        print(json.dumps(search_tables(result), indent=1))
    else:
        explanation = result.explain() if result.fits else result.explain()[:1]  # the rest is the error
        refusals = [f"refused {count}: {why}" for why, count in result.refusals.most_common(5)]
        print("\n".join(explanation + refusals))
    if not result.fits:
        raise result.none()
