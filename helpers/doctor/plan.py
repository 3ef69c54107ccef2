"""Compare a plan with a cluster: does the cluster have what the plan counts on?

The plan is read as JSON, so the planner itself is not needed here.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.doctor.findings import Findings
from helpers.doctor.problems import Problem, three_digits

# The share of a data sheet's speed that is enough. Large matrix products and all-reduces reach about 0.75 of it, and
# those of the doctor's sizes less. Below a half, something other than their size is the cause.
ENOUGH_OF_A_SPEED = 0.5


@dataclass(frozen=True)
class Need:
    """A number that a plan counts on."""

    name: str  # a key of ``numbers_of``, such as "ranks" or "memory"
    planned: float  # in base units, such as bytes
    unit: str = ""  # the unit in which it is printed, such as "GB"
    unit_size: float = 1.0  # how many base units one such unit has
    enough: float = 1.0  # the share of the planned number that is enough


@dataclass(frozen=True)
class Plan:
    """What a plan counts on."""

    title: str
    dtype: str  # of the matrix product that is tried
    needs: tuple[Need, ...]


@dataclass(frozen=True)
class Comparison:
    """A line about something that the plan counts on, and a problem if the cluster has less of it."""

    line: str
    problem: Problem | None = None


def read_plan(path: str) -> Plan:
    """Read what a plan counts on from its file. Raises ValueError if the file is missing or holds no plan."""
    try:
        return plan_in(json.loads(Path(path).read_text()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # The file may hold any JSON.
        raise ValueError(
            f"{path} holds no plan ({type(error).__name__}: {error}).\n"
            f"Write one: python -m helpers plan MODEL CLUSTER --layout dp=8 --json > {path}"
        ) from None


def plan_in(tables: dict[str, Any]) -> Plan:
    """What a plan counts on, from the tables that ``plan --json`` prints: model, cluster, layout and memory.

    Raises LookupError, TypeError or the like if something is missing or has another type.
    """
    cluster = tables["cluster"]
    layout = tables["layout"]
    title = f"{tables['model']['name']} on {cluster['gpus']} x {cluster['gpu']}"
    dtype = str(layout.get("dtype", "bfloat16"))
    ranks = math.prod(int(layout.get(dimension, 1)) for dimension in ("dp", "tp", "pp", "cp"))
    nodes = int(cluster["nodes"])
    bytes_per_gpu = float(tables["memory"]["limit"])
    peak_flops = float(cluster["peak"])  # FLOP/s of one GPU

    needs = [
        Need("ranks", planned=ranks),
        Need("nodes", planned=nodes),
        Need("memory", planned=bytes_per_gpu, unit="GB", unit_size=1e9),
        Need("matmul", planned=peak_flops, unit=f"TFLOP/s in {dtype}", unit_size=1e12, enough=ENOUGH_OF_A_SPEED),
    ]
    has_links_in_a_node = ranks > nodes
    if has_links_in_a_node:
        speed = float(cluster["link_in_node"])  # bytes per second
        needs.append(Need("in a node", planned=speed, unit="GB/s", unit_size=1e9, enough=ENOUGH_OF_A_SPEED))
    if nodes > 1:
        speed = float(cluster["link_between"])  # bytes per second
        needs.append(Need("between", planned=speed, unit="GB/s", unit_size=1e9, enough=ENOUGH_OF_A_SPEED))
    return Plan(title=title, dtype=dtype, needs=tuple(needs))


def compare(findings: Findings, plan: Plan) -> Iterator[Comparison]:
    """Yields a comparison for each number that the plan counts on."""
    numbers = numbers_of(findings)
    for need in plan.needs:
        yield compare_least(need, numbers[need.name])


def numbers_of(findings: Findings) -> dict[str, dict[int | None, float]]:
    """How much the cluster has of each thing that a plan may need: {its name: {rank: number in base units}}.

    For example {"ranks": {None: 2}, "memory": {0: 80e9, 1: 80e9}, …}. A number of the whole cluster, such as that of
    its ranks, has the key None in place of a rank.
    """
    hosts = [facts.host for facts in findings.facts.values()]
    memory: dict[int | None, float] = {}
    for rank, facts in findings.facts.items():
        if facts.gpu_id:
            memory[rank] = float(facts.device_memory)
        else:
            ranks_on_host = hosts.count(facts.host)  # These share the host's memory.
            memory[rank] = facts.device_memory / ranks_on_host

    matmul: dict[int | None, float] = {}
    in_node: dict[int | None, float] = {}
    between: dict[int | None, float] = {}
    for rank, speeds in findings.plan_speeds.items():
        if speeds is not None:
            matmul[rank] = speeds.matmul or 0.0
            in_node[rank] = speeds.in_node
            between[rank] = speeds.between
    return {
        "ranks": {None: findings.world_size},
        "nodes": {None: len(findings.hosts)},
        "memory": memory,
        "matmul": matmul,
        "in a node": in_node,
        "between": between,
    }


def compare_least(need: Need, number_of_rank: dict[int | None, float]) -> Comparison:
    """Compare what the plan needs of one thing with the rank that has least of it.

    ``number_of_rank`` is {rank: number}, or {None: number} for the whole cluster. The number is 0 on a rank where it
    could not be measured.
    """
    planned = three_digits(need.planned / need.unit_size)
    tried = {rank: number for rank, number in number_of_rank.items() if number > 0}
    if not tried:
        return Comparison(f"{need.name:10}was not tried, the plan counts on {planned}")

    rank_with_least = min(tried, key=lambda rank: tried[rank])
    least = tried[rank_with_least]
    if rank_with_least is None:
        where = "here"
        remedy = "Start as many (--nnodes, --nproc-per-node), or plan for what is here."
    else:
        where = f"on rank {rank_with_least}"
        remedy = "Look at that rank's host, or write what it has into the plan's [cluster]."
    measured = f"{three_digits(least / need.unit_size)} {need.unit}".rstrip()
    line = f"{need.name:10}has {measured} {where}, the plan counts on {planned}"
    is_enough = least >= need.enough * need.planned
    if is_enough:
        return Comparison(line)

    shortage = ""
    if need.enough < 1:
        shortage = f", less than {need.enough:.0%} of it"
    text = f"The plan counts on {planned} ({need.name}), and {where} is {measured}{shortage}."
    return Comparison(line, problem=Problem(text, remedy))
