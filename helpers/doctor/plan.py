"""The doctor reads a plan: does this cluster have what the plan counts on? Needs the plan's JSON, not the planner."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from helpers.doctor.findings import Findings, Problem
from helpers.doctor.trials import Speeds

# A data sheet's speed is not reached: large matrix products and all-reduces get some 0.75 of it, those of the doctor's
# sizes less. Below half of it, something other than the size is behind it.
SHARE = 0.5


@dataclass(frozen=True)
class Plan:
    """What a plan counts on, in base units."""

    title: str
    ranks: int
    nodes: int
    memory: float  # bytes of each rank
    dtype: str  # in which ``speeds`` has the matmul
    speeds: Speeds


def read_plan(path: str) -> Plan:
    """What the plan in this file counts on; ValueError for a file that holds no plan."""
    try:
        tables = json.loads(Path(path).read_text())
        cluster, layout = tables["cluster"], tables["layout"]
        links = (float(cluster.get(name, 0)) for name in ("link_in_node", "link_between"))
        return Plan(
            title=f"{tables['model']['name']} on {cluster['gpus']} x {cluster['gpu']}",
            ranks=math.prod(int(layout.get(name, 1)) for name in ("dp", "tp", "pp", "cp")),
            nodes=int(cluster["nodes"]),
            memory=float(tables["memory"]["limit"]),
            dtype=str(layout.get("dtype", "bfloat16")),
            speeds=Speeds(float(cluster["peak"]), *links),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        how = f"Write one: python -m helpers plan MODEL CLUSTER --layout dp=8 --json > {path}"
        raise ValueError(f"{path} holds no plan ({type(error).__name__}: {error}).\n{how}") from None


def compared(findings: Findings, plan: Plan) -> Iterator[tuple[str, Problem | None]]:
    """Yields each number that the plan counts on, as (one line, the problem if it is not there)."""
    hosts = [facts.host for facts in findings.facts.values()]
    for label, here, target in (("ranks", findings.world_size, plan.ranks), ("nodes", len(set(hosts)), plan.nodes)):
        problem = (
            f"The plan counts on {target} {label}, and here are {here}.",
            "Start as many (--nnodes, --nproc-per-node), or plan for what is here.",
        )
        yield f"{label:10}has {here}, the plan counts on {target}", problem if here != target else None
    memory = {  # of its GPU, or its part of the host's
        rank: facts.device_memory / (1 if facts.gpu_id else hosts.count(facts.host))
        for rank, facts in findings.facts.items()
    }
    yield least("memory", "GB", memory, plan.memory, "memory", share=1)
    rows = [("matmul", "matmul", f"TFLOP/s in {plan.dtype}", f"peaks.{plan.dtype}")]
    rows += [("in a node", "in_node", "GB/s", "link_in_node")] * (plan.ranks > plan.nodes)
    rows += [("between", "between", "GB/s", "link_between")] * (plan.nodes > 1)
    for label, name, unit, field in rows:
        per_rank = {rank: getattr(speeds, name) for rank, speeds in findings.speeds.items() if speeds}
        yield least(label, unit, per_rank, getattr(plan.speeds, name), field)


def least(
    label: str, unit: str, per_rank: Mapping[int, float | None], target: float, field: str, share: float = SHARE
) -> tuple[str, Problem | None]:
    """The least of the ranks' numbers, as ``compared`` yields it: ``share`` of the plan's number is enough."""
    size = 1e12 if unit.startswith("T") else 1e9
    numbers = {rank: number for rank, number in per_rank.items() if number}
    if not numbers:
        return f"{label:10}was not tried, the plan counts on {target / size:.3g}", None
    rank = min(numbers, key=numbers.__getitem__)
    line = f"{label:10}has {numbers[rank] / size:.3g} {unit} on rank {rank}, the plan counts on {target / size:.3g}"
    if numbers[rank] >= share * target:
        return line, None
    less = "less" if share == 1 else f"less than {share:.0%}"
    return line, (
        f"The plan counts on {target / size:.3g} {unit} {label}, and rank {rank} has {less} of it.",
        f"Look at that rank's host; or plan again with [cluster] {field} = {numbers[rank]:.3g}",
    )
