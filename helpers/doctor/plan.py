"""The doctor reads a plan: does this cluster have what the plan counts on? Needs the plan's JSON, not the planner."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from helpers.doctor.findings import Findings
from helpers.doctor.problems import Problem
from helpers.doctor.trials import Speeds

# A data sheet's speed is not reached: large matrix products and all-reduces get some 0.75 of it, those of the doctor's
# sizes less. Below half of it, something other than the size is behind it.
ENOUGH_OF_A_SPEED = 0.5


@dataclass(frozen=True)
class Plan:
    """What a plan counts on, in base units."""

    title: str
    ranks: int
    nodes: int
    memory: float  # bytes of each rank
    dtype: str  # of the matrix product in ``speeds``
    speeds: Speeds


@dataclass(frozen=True)
class Comparison:
    """A line about something that the plan counts on, and the problem where the cluster has less of it."""

    line: str
    problem: Problem | None = None


@dataclass(frozen=True)
class Quantity:
    """Something of which every rank should have enough for the plan."""

    label: str
    unit: str
    unit_size: float  # in base units
    planned: float  # in base units
    field: str  # of the plan's table [cluster]
    enough: float = ENOUGH_OF_A_SPEED  # the share of the planned number that a rank should have


def read_plan(path: str) -> Plan:
    """What the plan in this file counts on; ValueError for a file that holds no plan."""
    try:
        tables = json.loads(Path(path).read_text())
        cluster = tables["cluster"]
        layout = tables["layout"]
        return Plan(
            title=f"{tables['model']['name']} on {cluster['gpus']} x {cluster['gpu']}",
            ranks=math.prod(int(layout.get(dimension, 1)) for dimension in ("dp", "tp", "pp", "cp")),
            nodes=int(cluster["nodes"]),
            memory=float(tables["memory"]["limit"]),
            dtype=str(layout.get("dtype", "bfloat16")),
            speeds=Speeds(
                matmul=float(cluster["peak"]),
                in_node=float(cluster.get("link_in_node", 0)),
                between=float(cluster.get("link_between", 0)),
            ),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} holds no plan ({type(error).__name__}: {error}).\n"
            f"Write one: python -m helpers plan MODEL CLUSTER --layout dp=8 --json > {path}"
        ) from None


def compare(findings: Findings, plan: Plan) -> Iterator[Comparison]:
    """Yields a comparison for each number that the plan counts on."""
    yield compare_count("ranks", findings.world_size, plan.ranks)
    yield compare_count("nodes", len(findings.hosts), plan.nodes)

    memory = Quantity("memory", "GB", 1e9, plan.memory, field="memory", enough=1.0)
    yield compare_least(memory, memory_by_rank(findings))

    speeds = {rank: speeds for rank, speeds in findings.plan_speeds.items() if speeds is not None}
    peak = plan.speeds.matmul or 0.0
    matmul = Quantity("matmul", f"TFLOP/s in {plan.dtype}", 1e12, peak, field=f"peaks.{plan.dtype}")
    yield compare_least(matmul, {rank: speed.matmul for rank, speed in speeds.items()})
    if plan.ranks > plan.nodes:
        in_node = Quantity("in a node", "GB/s", 1e9, plan.speeds.in_node, field="link_in_node")
        yield compare_least(in_node, {rank: speed.in_node for rank, speed in speeds.items()})
    if plan.nodes > 1:
        between = Quantity("between", "GB/s", 1e9, plan.speeds.between, field="link_between")
        yield compare_least(between, {rank: speed.between for rank, speed in speeds.items()})


def memory_by_rank(findings: Findings) -> dict[int, float]:
    """{rank: bytes of its GPU, or its part of the host's memory}."""
    hosts = [facts.host for facts in findings.facts.values()]
    memory = {}
    for rank, facts in findings.facts.items():
        if facts.gpu_id:
            memory[rank] = float(facts.device_memory)
        else:
            memory[rank] = facts.device_memory / hosts.count(facts.host)
    return memory


def compare_count(label: str, count: int, planned: int) -> Comparison:
    line = f"{label:10}has {count}, the plan counts on {planned}"
    if count == planned:
        return Comparison(line)
    problem = Problem(
        f"The plan counts on {planned} {label}, and here are {count}.",
        "Start as many (--nnodes, --nproc-per-node), or plan for what is here.",
    )
    return Comparison(line, problem)


def compare_least(quantity: Quantity, by_rank: Mapping[int, float | None]) -> Comparison:
    """Compare the rank that has least of a quantity with the plan."""
    planned = f"{quantity.planned / quantity.unit_size:.3g}"
    measured = {rank: number for rank, number in by_rank.items() if number}
    if not measured:
        return Comparison(f"{quantity.label:10}was not tried, the plan counts on {planned}")

    rank = min(measured, key=lambda rank: measured[rank])
    number = measured[rank]
    line = (
        f"{quantity.label:10}has {number / quantity.unit_size:.3g} {quantity.unit} on rank {rank}, "
        f"the plan counts on {planned}"
    )
    if number >= quantity.enough * quantity.planned:
        return Comparison(line)
    shortage = "less"
    if quantity.enough < 1:
        shortage = f"less than {quantity.enough:.0%}"
    problem = Problem(
        f"The plan counts on {planned} {quantity.unit} {quantity.label}, and rank {rank} has {shortage} of it.",
        f"Look at that rank's host; or plan again with [cluster] {quantity.field} = {number:.3g}",
    )
    return Comparison(line, problem)
