"""The doctor reads a plan: does this cluster have what the plan counts on? Needs the plan's JSON, not the planner."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers.doctor.findings import Findings, Problem
from helpers.doctor.trials import Speeds

# A data sheet's speed is not reached: large matrix products and all-reduces get some 0.75 of it, those of the doctor's
# sizes less. Below half of it, something other than the size is behind it.
SHARE = 0.5
HOW = "Write a plan with: python -m helpers plan MODEL CLUSTER --layout dp=8 --json >"


@dataclass(frozen=True)
class Plan:
    """What a plan counts on, in base units. A speed of 0: the plan does not say."""

    model: str
    gpu: str
    ranks: int
    nodes: int
    memory: float  # bytes of each rank
    dtype: str  # in which ``speeds`` has the matmul
    speeds: Speeds


@dataclass(frozen=True)
class Quantity:
    """A number that each rank has for itself."""

    label: str
    unit: str
    size: float  # of the unit
    field: str  # of a planner's file, with # for the number
    share: float = SHARE  # of the plan's number that is enough


MEMORY = Quantity("memory", "GB", 1e9, "memory = #", share=1)
SPEEDS = {
    "matmul": Quantity("matmul", "TFLOP/s in {dtype}", 1e12, "peaks = {{{dtype} = #}}"),
    "in_node": Quantity("in a node", "GB/s", 1e9, "link_in_node = #"),
    "between": Quantity("between", "GB/s", 1e9, "link_between = #"),
}


def read_plan(path: str | Path) -> Plan:
    """What the plan in this file counts on; ValueError for a file that holds no plan."""
    try:
        tables = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"The plan {path}: {error.strerror}.\n{HOW} {path}, where every rank can read it.") from None
    except ValueError as error:
        raise ValueError(f"The plan {path} is not JSON, or a part of it: {error}.\n{HOW} {path}") from None
    try:
        cluster, layout = tables["cluster"], tables["layout"]
        links = (float(cluster.get(name, 0)) for name in ("link_in_node", "link_between"))
        return Plan(
            model=str(tables["model"]["name"]),
            gpu=str(cluster["gpu"]),
            ranks=math.prod(int(layout.get(name, 1)) for name in ("dp", "tp", "pp", "cp")),
            nodes=int(cluster["nodes"]),
            memory=float(tables["memory"]["limit"]),
            dtype=str(layout.get("dtype", "bfloat16")),
            speeds=Speeds(float(cluster["peak"]), *links),
        )
    except KeyError as error:
        raise ValueError(f"{path} has no {error.args[0]!r}, so it is not a plan.\n{HOW} {path}") from None
    except (TypeError, ValueError, AttributeError):
        raise ValueError(f"{path} is JSON, but not a plan's.\n{HOW} {path}") from None


def compared(findings: Findings, plan: Plan) -> Iterator[tuple[str, Problem | None]]:
    """Yields each number that the plan counts on, as (one line, the problem if it is not there)."""
    gpus = {facts.gpu_id: facts.model for facts in findings.facts.values() if facts.gpu_id}
    rows = [("ranks", findings.world_size, plan.ranks, ""), ("nodes", len(findings.hosts), plan.nodes, "")]
    if plan.gpu != "cpu" or gpus:
        rows.append(("GPUs", len(gpus), plan.ranks, f" ({', '.join(sorted(set(gpus.values())))})" if gpus else ""))
    for label, here, target, kinds in rows:
        problem = (
            f"The plan counts on {target} {label}, and here are {here}.",
            "Start as many (--nnodes, --nproc-per-node), or plan for what is here.",
        )
        yield f"{label:10}has {here}{kinds}, the plan counts on {target}", problem if here != target else None
    yield least(memory_of_ranks(findings), plan.memory, MEMORY, plan.dtype)
    for name, quantity in SPEEDS.items():
        per_rank = {rank: getattr(speeds, name) for rank, speeds in findings.speeds.items() if speeds}
        no_link = {"in_node": plan.ranks == plan.nodes, "between": plan.nodes == 1}
        if not no_link.get(name):
            yield least(per_rank, getattr(plan.speeds, name), quantity, plan.dtype)


def memory_of_ranks(findings: Findings) -> dict[int, float | None]:
    """{rank: bytes}: of its GPU, or its part of the host's."""
    hosts = [facts.host for facts in findings.facts.values()]
    return {
        rank: facts.device_memory / (1 if facts.gpu_id else hosts.count(facts.host))
        for rank, facts in findings.facts.items()
        if facts.device_memory
    }


def least(
    per_rank: dict[int, float | None], target: float, quantity: Quantity, dtype: str
) -> tuple[str, Problem | None]:
    """A number that each rank has, as ``compared`` yields it: that of the rank with the least."""
    numbers = {rank: number for rank, number in per_rank.items() if number}
    unit, label = quantity.unit.format(dtype=dtype), quantity.label
    clause = f"the plan counts on {target / quantity.size:.3g}" if target else "the plan does not say"
    if not numbers:
        return f"{label:10}was not tried, {clause}", None
    rank, here = min(numbers.items(), key=lambda entry: entry[1])
    line = f"{label:10}has {here / quantity.size:.3g} {unit} on rank {rank}, {clause}"
    if here >= quantity.share * target:
        return line, None
    less = "less" if quantity.share == 1 else f"less than {quantity.share:.0%}"
    field = quantity.field.format(dtype=dtype).replace("#", f"{here:.3g}")
    return line, (
        f"{clause[0].upper()}{clause[1:]} {unit} {label}, and rank {rank} has {less} of it.",
        f"Look at that rank's host; or plan again with [cluster] {field}",
    )
