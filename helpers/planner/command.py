"""``python -m helpers plan``: a model and a cluster, by name or in a small file, become a plan."""

import json
import sys
import tomllib
from pathlib import Path

from helpers.command_line import whole
from helpers.planner import cluster as clusters
from helpers.planner import model as models
from helpers.planner.model import PlanError, known

TABLES = ("model", "cluster", "layout", "job", "conventions")
EXAMPLE = 'write model = "llama3-8b", cluster = "h100", [layout] dp = 8'


def add_arguments(command):
    """Add the arguments of ``plan`` to its parser."""
    command.add_argument(
        "model", metavar="MODEL|FILE", help=f"a file (.toml or .json) with {', '.join(TABLES)}; or a model's name"
    )
    command.add_argument(
        "cluster", nargs="?", metavar="CLUSTER", help=f"one of {', '.join(clusters.PRESETS)}; or a file"
    )
    command.add_argument("--gpus", type=whole, metavar="N", help="how many GPUs: of a named cluster, or to search for")
    for name in ("layout", "job", "conventions"):
        command.add_argument(f"--{name}", metavar="A=1,B=2", help=f"fields of the {name}; they win over the file's")
    command.add_argument("--search", action="store_true", help="rank all layouts for these GPUs and this batch")
    command.add_argument("--published", action="store_true", help="FILE holds published rows (.csv): reproduce them")
    command.add_argument("--json", action="store_true", help="numbers in base units instead of words")


def value_of(text):
    """A number, true, false or a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def fields_of(text):
    """{name: value} from "a=1,b=2"."""
    found = {}
    for part in filter(None, (text or "").split(",")):
        name, _, value = (text.strip() for text in part.partition("="))
        if not name or not value:
            raise PlanError(f"{part!r} has no {'value' if name else 'name'}.\nWrite name=value, with commas between.")
        if name in found:
            raise PlanError(f"{name} is given twice.\nGive one value.")
        found[name] = value_of(value)
    return found


def once(pairs):
    """A JSON object's dict. Raises a PlanError for a key that stands there twice, of which json would keep the last."""
    found = {}
    for name, value in pairs:
        if name in found:
            raise PlanError(f"{name!r} is given twice.\nGive one value.")
        found[name] = value
    return found


def read(path, what, names):
    """The tables of a TOML or a JSON file, where the name of a model or a cluster could stand as well."""
    try:
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise PlanError(f"the file is empty.\nGive these tables: {', '.join(TABLES)}.")
        tables = json.loads(text, object_pairs_hook=once) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}.\nGive a file, or a {what}: {', '.join(names)}.") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path} is not text in UTF-8.\nGive a file of TOML or JSON.") from None
    except RecursionError:
        raise PlanError(f"{path} has too many brackets inside of each other.\nGive tables of fields.") from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    except (tomllib.TOMLDecodeError, ValueError) as error:
        raise PlanError(
            f"{path} is not {'JSON' if path.suffix == '.json' else 'TOML'}: {error}.\nMend that line."
        ) from None
    if not isinstance(tables, dict) or (unknown := [name for name in tables if name not in TABLES]):
        found = f"a table {unknown[0]!r}" if isinstance(tables, dict) else f"no tables, but a {type(tables).__name__}"
        raise PlanError(f"{path} has {found}.\nGive these tables: {', '.join(TABLES)}.")
    return tables


def given(args):
    """{table: its fields} of a command line."""
    path = Path(args.model)
    is_file = path.suffix in (".toml", ".json") or path.is_file()
    tables = read(path, "model", models.PRESETS) if is_file else {"model": args.model}
    if args.cluster:
        file = Path(args.cluster)
        tables["cluster"] = args.cluster
        if file.suffix in (".toml", ".json"):
            tables["cluster"] = read(file, "cluster", clusters.PRESETS).get("cluster")
            if tables["cluster"] is None:
                raise PlanError(f"{file} has no [cluster].\nAdd it, or give a name: {', '.join(clusters.PRESETS)}.")
    for name in ("layout", "job", "conventions"):
        table = tables.get(name, {})
        if not isinstance(table, dict):
            raise PlanError(f"{name} is {table!r}.\nWrite it as a table: [{name}], then a line for each field.")
        tables[name] = {**table, **fields_of(getattr(args, name))}
    for name in ("model", "cluster"):
        if name not in tables:
            raise PlanError(f"no {name} is given.\nGive a name, or {EXAMPLE}.")
    return tables


def show_published(path, as_json):
    """Reproduce a file of published rows; return 1 where one misses its target or contradicts itself."""
    from helpers.planner.published import TARGETS, reproduce, rows_of

    found, status = [], 0
    try:
        rows = rows_of(path)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise PlanError(f"{path}: {why}.\nGive a file of rows, such as book/recorded/published.csv.") from None
    for row in rows:
        try:
            value, error = reproduce(row)
            said = {"computed": value, "error": error, "within": error <= known(TARGETS, row["target"], "target")}
        except PlanError as refused:
            said = {"refused": str(refused).replace("\n", " "), "within": False}
        status |= not said["within"]
        found.append({"what": row["what"], "published": row["published"], "unit": row["unit"], **said})
    if as_json:
        print(json.dumps(found, indent=1))
        return status
    for one in found:
        said = one.get("refused") or f"{one['computed']:.6g} {one['unit']}, published {one['published']}"
        print(f"{'within' if one['within'] else 'MISSED'}  {one['what']}: {said}")
    return status


def main(args):
    """Carry ``plan`` out; return the exit status: 1 for a plan that cannot be, with a line or two on stderr."""
    try:
        if args.published:
            if unused := [
                name for name in ("cluster", "gpus", "layout", "job", "conventions", "search") if vars(args)[name]
            ]:
                raise PlanError(f"--published reads rows, and takes no {unused[0]}.\nLeave one of the two out.")
            return show_published(args.model, args.json)
        tables = given(args)
        if args.search or not tables["layout"].keys() & {"dp", "tp", "pp", "cp"}:
            if not (found := show_search(args, tables)).fits:
                raise found.none()
            return 0
        from helpers.planner.plan import plan
        from helpers.planner.report import lines

        found = plan(tables["model"], cluster_for(args, tables), tables["layout"], tables["conventions"], tables["job"])
        print(json.dumps(found, indent=1) if args.json else "\n".join(lines(found)))
        return 0
    except (PlanError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except ArithmeticError:
        print("error: a number is too large or too small to plan with.\nGive a real job's numbers.", file=sys.stderr)
    return 1


def show_search(args, tables):
    """Rank and print the layouts of a model on a cluster, and return the Search; fields that are given stay."""
    from helpers.planner.layout import layout_of
    from helpers.planner.search import search, words

    model, cluster = models.model_of(tables["model"]), clusters.cluster_of(tables["cluster"], args.gpus or 0)
    if args.job:
        raise PlanError(
            "a search does not plan the --job.\nLeave it out, and plan again with the layout that you choose."
        )
    fixed = dict(tables["layout"])
    batch = fixed.pop("batch", 0)
    if not batch:
        raise PlanError("a search needs the samples of a step.\nGive --layout batch=1024, and sizes that are to stay.")
    # What no mesh would make right is refused here, with its own next step, and not once for each layout.
    layout_of({name: value for name, value in fixed.items() if name not in ("ep", "shard", "interleave")})
    found = search(model, cluster, batch, tables["conventions"], **fixed)
    if not args.json:
        explained = found.explain() if found.fits else found.explain()[:1]  # the rest is the error
        lines = explained + [f"refused {count}: {why}" for why, count in found.refused.most_common(5)]
        print("\n".join(lines))
        return found
    ranked = [
        {"seconds": one.seconds, "low": one.step.low, "high": one.step.high, "bytes": one.bytes}
        | {"words": words(one.layout), "layout": one.layout.__dict__}
        for one in found.fits[:10]
    ]
    told = {"tried": found.tried, "refused": found.refused, "too_large": found.by_memory(), "fits": len(found.fits)}
    print(json.dumps({"conventions": found.conventions.words(), **told, "ranked": ranked}, indent=1))
    return found


def cluster_for(args, tables):
    """The file's cluster, or a named one of as many GPUs as the layout has or --gpus says."""
    from helpers.planner.layout import layout_of

    named = isinstance(tables["cluster"], str)
    return clusters.cluster_of(tables["cluster"], args.gpus or (layout_of(tables["layout"]).gpus if named else 0))
