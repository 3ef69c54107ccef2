"""``python -m helpers plan``: a model and a cluster, by name or in a small file, become a plan."""

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from helpers.command_line import whole
from helpers.planner import cluster as clusters
from helpers.planner import model as models
from helpers.planner.layout import layout_of
from helpers.planner.plan import plan
from helpers.planner.records import PlanError
from helpers.planner.report import lines, tables
from helpers.planner.search import Search, search, words

TABLES = ("model", "cluster", "layout", "job", "conventions")
EXAMPLE = 'write model = "llama3-8b", cluster = "h100", [layout] dp = 8'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan`` to its parser."""
    parser.add_argument("model", metavar="MODEL|FILE", help=f"a TOML file with {', '.join(TABLES)}; or a model's name")
    parser.add_argument(
        "cluster", nargs="?", metavar="CLUSTER", help=f"one of {', '.join(clusters.PRESETS)}; or a TOML file"
    )
    parser.add_argument("--gpus", type=whole, metavar="N", help="how many GPUs: of a named cluster, or to search for")
    for name in ("layout", "job", "conventions"):
        parser.add_argument(f"--{name}", metavar="A=1,B=2", help=f"fields of the {name}; they win over the file's")
    parser.add_argument("--search", action="store_true", help="rank all layouts for these GPUs and this batch")
    parser.add_argument("--published", action="store_true", help="FILE holds published rows (.csv): reproduce them")
    parser.add_argument("--json", action="store_true", help="numbers in base units instead of words")


def main(arguments: argparse.Namespace) -> int:
    """Carry ``plan`` out; return the exit status: 1 for a plan that cannot be, with a line or two on stderr."""
    try:
        if arguments.published:
            return show_published(arguments)
        job = read_job(arguments)
        if arguments.search or not job["layout"].keys() & {"dp", "tp", "pp", "cp"}:
            return show_search(arguments, job)
        return show_plan(arguments, job)
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
            raise PlanError(f"{name} is given twice.\nGive one value.")
        try:
            table[name] = json.loads(value)
        except ValueError:
            table[name] = value
    return table


def read(path: Path, what: str, names: dict[str, Any]) -> dict[str, Any]:
    """The tables of a TOML file, where the name of a model or a cluster could stand as well."""
    try:
        job = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}.\nGive a TOML file, or a {what}: {', '.join(names)}.") from None
    except ValueError as error:  # it is not TOML, or not even text
        raise PlanError(f"{path} is not TOML: {error}.\nMend that line.") from None
    if unknown := [name for name in job if name not in TABLES]:
        raise PlanError(f"{path} has a table {unknown[0]!r}.\nGive these tables: {', '.join(TABLES)}.")
    return job


def is_file(text: str, names: dict[str, Any]) -> bool:
    """Whether an argument means a file: a name that the planner knows never does."""
    return text not in names and (text.endswith(".toml") or Path(text).is_file())


def read_job(arguments: argparse.Namespace) -> dict[str, Any]:
    """{table: its fields} of a command line and its files."""
    job: dict[str, Any] = {"model": arguments.model}
    if is_file(arguments.model, models.PRESETS):
        job = read(Path(arguments.model), "model", models.PRESETS)
    if arguments.cluster:
        job["cluster"] = arguments.cluster
        if is_file(arguments.cluster, clusters.PRESETS):
            job["cluster"] = read(Path(arguments.cluster), "cluster", clusters.PRESETS).get("cluster")
    for name in ("layout", "job", "conventions"):
        table = job.get(name, {})
        if not isinstance(table, dict):
            raise PlanError(f"{name} is {table!r}.\nWrite it as a table: [{name}], then a line for each field.")
        job[name] = {**table, **fields_of(getattr(arguments, name) or "")}
    for name in ("model", "cluster"):
        if job.get(name) is None:
            raise PlanError(f"no {name} is given.\nGive a name, or {EXAMPLE}.")
    return job


def show_plan(arguments: argparse.Namespace, job: dict[str, Any]) -> int:
    cluster, gpus = job["cluster"], arguments.gpus
    if isinstance(cluster, str) and not gpus:  # as many as the layout has
        gpus = layout_of(job["layout"]).gpus
    result = plan(job["model"], clusters.cluster_of(cluster, gpus or 0), job["layout"], job["conventions"], job["job"])
    print(json.dumps(tables(result), indent=1) if arguments.json else "\n".join(lines(result)))
    return 0


def show_search(arguments: argparse.Namespace, job: dict[str, Any]) -> int:
    """Rank and print the layouts of a model on a cluster; fields that are given stay."""
    model, cluster = models.model_of(job["model"]), clusters.cluster_of(job["cluster"], arguments.gpus or 0)
    if arguments.job:
        raise PlanError(
            "a search does not plan the --job.\nLeave it out, and plan again with the layout that you choose."
        )
    constraints = dict(job["layout"])
    batch = constraints.pop("batch", 0)
    if not batch:
        raise PlanError("a search needs the samples of a step.\nGive --layout batch=1024, and sizes that are to stay.")
    result = search(model, cluster, batch, job["conventions"], **constraints)
    if arguments.json:
        print(json.dumps(search_tables(result), indent=1))
    else:
        explanation = result.explain() if result.fits else result.explain()[:1]  # the rest is the error
        refusals = [f"refused {count}: {why}" for why, count in result.refusals.most_common(5)]
        print("\n".join(explanation + refusals))
    if not result.fits:
        raise result.none()
    return 0


def search_tables(result: Search) -> dict[str, Any]:
    """A search as JSON has it, with the ten fastest layouts."""
    return {
        "conventions": vars(result.conventions),
        "tried": result.tried,
        "refused": result.refusals,
        "too_large": result.by_memory(),
        "fits": len(result.fits),
        "ranked": [
            {
                "seconds": fit.seconds,
                "low": fit.step.low,
                "high": fit.step.high,
                "bytes": fit.bytes,
                "words": words(fit.layout),
                "layout": vars(fit.layout),
            }
            for fit in result.fits[:10]
        ],
    }


def show_published(arguments: argparse.Namespace) -> int:
    """Reproduce a file of published rows; return 1 where one misses its target or contradicts itself."""
    from helpers.planner.experiments.published import TARGETS, reproduce, rows_of

    for name in ("cluster", "gpus", "layout", "job", "conventions", "search"):
        if getattr(arguments, name):
            raise PlanError(f"--published reads rows, and takes no {name}.\nLeave one of the two out.")
    path, results = Path(arguments.model), []
    for row in rows_of(path):
        try:
            value, error = reproduce(row)
            result: dict[str, Any] = {"computed": value, "error": error, "within": error <= TARGETS[row["target"]]}
        except PlanError as refusal:
            result = {"refused": str(refusal).replace("\n", " "), "within": False}
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            why = f"{path} has a row that cannot be computed: {error!r}"
            raise PlanError(f"{why}.\nGive rows like those of book/recorded/published.csv.") from None
        results.append({**{name: row[name] for name in ("what", "published", "unit")}, **result})
    if arguments.json:
        print(json.dumps(results, indent=1))
    else:
        for row in results:
            text = row.get("refused") or f"{row['computed']:.6g} {row['unit']}, published {row['published']}"
            print(f"{'within' if row['within'] else 'MISSED'}  {row['what']}: {text}")
    return int(not results or not all(row["within"] for row in results))
