"""The doctor reads a plan: does this cluster have what the plan counts on? Needs the plan's JSON, not the planner."""

import json
import math
from pathlib import Path

# A data sheet's speed is not reached: large matrix products and all-reduces get some 0.75 of it, those of the doctor's
# sizes less. Below half of it, something other than the size is behind it.
SHARE = 0.5
DIMENSIONS = ("dp", "tp", "pp", "cp")
HOW = "Write a plan with: python -m helpers plan MODEL CLUSTER --layout dp=8 --json >"


def read_plan(path):
    """What a plan counts on, as a dict in base units; ValueError for a file that holds no plan."""
    path = Path(path)
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"The plan {path}: {error.strerror}.\n{HOW} {path}, where every rank can read it.") from None
    except ValueError as error:
        raise ValueError(f"The plan {path} is not JSON, or a part of it: {error}.\n{HOW} {path}") from None
    try:
        cluster, layout = found["cluster"], found["layout"]
        counted = {
            "model": str(found["model"]["name"]),
            "gpu": str(cluster["gpu"]),
            "ranks": math.prod(int(layout.get(name, 1)) for name in DIMENSIONS),
            "nodes": int(cluster["nodes"]),
            "memory": float(found["memory"]["limit"]),
            "dtype": str(layout.get("dtype", "bfloat16")),
            "matmul": float(cluster["peak"]),
            "in_node": float(cluster.get("link_in_node", 0)),  # 0: the plan does not say
            "between": float(cluster.get("link_between", 0)),
        }
    except KeyError as error:
        raise ValueError(f"{path} has no {error.args[0]!r}, so it is not a plan.\n{HOW} {path}") from None
    except (TypeError, ValueError, AttributeError):
        raise ValueError(f"{path} is JSON, but not a plan's.\n{HOW} {path}") from None
    return counted


def least(answers):
    """(the least of {rank: number or None}, its rank), or (None, None) where there is none."""
    known = {rank: number for rank, number in answers.items() if number}
    rank = min(known, key=known.get, default=None)
    return known.get(rank), rank


def memory_of_ranks(infos):
    """{rank: bytes}: of its GPU, or its part of the host's."""
    hosts = [info["host"] for info in infos.values()]
    return {
        rank: info["device_memory"] / (1 if info["gpu_id"] else hosts.count(info["host"]))
        for rank, info in infos.items()
        if info["device_memory"]
    }


def compared(found):
    """[(one line, what is wrong or "", the next thing to try)] of a plan and of what was found."""
    plan, infos, measured = found["plan"], found["infos"], found["measured"]
    gpus = {info["gpu_id"]: info["model"] for info in infos.values() if info["gpu_id"]}
    counts = {
        "ranks": (found["world_size"], plan["ranks"], ""),
        "nodes": (len({info["host"] for info in infos.values()}), plan["nodes"], ""),
    }
    if plan["gpu"] != "cpu" or gpus:
        counts["GPUs"] = (len(gpus), plan["ranks"], f" ({', '.join(sorted(set(gpus.values())))})" if gpus else "")
    for label, (has, wanted, kinds) in counts.items():
        line = f"{label:10}has {has}{kinds}, the plan counts on {wanted}"
        wrong = f"The plan counts on {wanted} {label}, and here are {has}." if has != wanted else ""
        yield line, wrong, "Start as many (--nnodes, --nproc-per-node), or plan for what is here."

    per_rank = {name: {rank: mine and mine[name] for rank, mine in measured.items()} for name in SPEEDS}
    per_rank["memory"] = memory_of_ranks(infos)
    for name, (label, unit, size, field) in {**MEMORY, **SPEEDS}.items():
        if (name == "in_node" and plan["ranks"] == plan["nodes"]) or (name == "between" and plan["nodes"] == 1):
            continue  # the plan has no such link
        (has, rank), wanted = least(per_rank[name]), plan[name]
        field, unit = field.format(**plan), unit.format(**plan)
        enough = not has or has >= (wanted if name in MEMORY else SHARE * wanted)
        told = f"has {has / size:.3g} {unit} on rank {rank}" if has else "was not tried"
        counted = f"the plan counts on {wanted / size:.3g}" if wanted else "the plan does not say"
        less = "less" if name in MEMORY else f"less than {SHARE:.0%}"
        wrong = f"The plan counts on {wanted / size:.3g} {unit} {label}, and rank {rank} has {less} of it."
        remedy = f"Look at that rank's host; or plan again with [cluster] {field.replace('#', f'{has or 0:.3g}')}"
        yield f"{label:10}{told}, {counted}", "" if enough else wrong, remedy


# {name: (label, unit, its size, the field of a planner's file)}
MEMORY = {"memory": ("memory", "GB", 1e9, "memory = #")}
SPEEDS = {
    "matmul": ("matmul", "TFLOP/s in {dtype}", 1e12, "peaks = {{{dtype} = #}}"),
    "in_node": ("in a node", "GB/s", 1e9, "link_in_node = #"),
    "between": ("between", "GB/s", 1e9, "link_between = #"),
}
