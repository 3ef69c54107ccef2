"""The doctor reads a plan: does this cluster have what the plan counts on? Needs the plan's JSON, not the planner."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers.doctor.findings import Findings
from helpers.doctor.problems import Problem, three_digits

# A data sheet's speed is not reached: large matrix products and all-reduces get some 0.75 of it, those of the doctor's
# sizes less. Below half of it, something other than the size is behind it.
ENOUGH_OF_A_SPEED = 0.5


@dataclass(frozen=True)
class Need:
    """A number that a plan counts on."""

    name: str  # what it is a number of, as a key of ``numbers_of``
    planned: float  # in base units
    unit: str = ""  # in which it is printed
    unit_size: float = 1.0  # how many base units that is
    enough: float = 1.0  # the share of the planned number that will do


@dataclass(frozen=True)
class Plan:
    """What a plan counts on."""

    title: str
    dtype: str  # of the matrix product that is tried
    needs: tuple[Need, ...]


@dataclass(frozen=True)
class Comparison:
    """A line about something that the plan counts on, and the problem where the cluster has less of it."""

    line: str
    problem: Problem | None = None


def read_plan(path: str) -> Plan:
    """What the plan in this file counts on; ValueError for a file that holds no plan."""
    try:
        tables = json.loads(Path(path).read_text())
        cluster = tables["cluster"]
        layout = tables["layout"]
        title = f"{tables['model']['name']} on {cluster['gpus']} x {cluster['gpu']}"
        dtype = str(layout.get("dtype", "bfloat16"))
        ranks = math.prod(int(layout.get(dimension, 1)) for dimension in ("dp", "tp", "pp", "cp"))
        nodes = int(cluster["nodes"])
        needs = [
            Need("ranks", ranks),
            Need("nodes", nodes),
            Need("memory", float(tables["memory"]["limit"]), "GB", 1e9),
            Need("matmul", float(cluster["peak"]), f"TFLOP/s in {dtype}", 1e12, ENOUGH_OF_A_SPEED),
        ]
        if ranks > nodes:
            needs.append(Need("in a node", float(cluster["link_in_node"]), "GB/s", 1e9, ENOUGH_OF_A_SPEED))
        if nodes > 1:
            needs.append(Need("between", float(cluster["link_between"]), "GB/s", 1e9, ENOUGH_OF_A_SPEED))
        return Plan(title, dtype, tuple(needs))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} holds no plan ({type(error).__name__}: {error}).\n"
            f"Write one: python -m helpers plan MODEL CLUSTER --layout dp=8 --json > {path}"
        ) from None


def compare(findings: Findings, plan: Plan) -> Iterator[Comparison]:
    """Yields a comparison for each number that the plan counts on."""
    numbers = numbers_of(findings)
    for need in plan.needs:
        yield compare_least(need, numbers[need.name])


def numbers_of(findings: Findings) -> dict[str, dict[int | None, float]]:
    """What the doctor found of each need: {name: {rank: number in base units}}. The key None is the whole cluster."""
    hosts = [facts.host for facts in findings.facts.values()]
    memory: dict[int | None, float] = {}
    for rank, facts in findings.facts.items():
        if facts.gpu_id:
            memory[rank] = float(facts.device_memory)
        else:  # The ranks of a host share its memory.
            memory[rank] = facts.device_memory / hosts.count(facts.host)

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


def compare_least(need: Need, by_rank: dict[int | None, float]) -> Comparison:
    """Compare what the plan needs with the rank that has least of it.

    by_rank: {rank: number}, or {None: number} for the whole cluster; 0 on a rank where it could not be tried.
    """
    planned = three_digits(need.planned / need.unit_size)
    tried = {rank: number for rank, number in by_rank.items() if number > 0}
    if not tried:
        return Comparison(f"{need.name:10}was not tried, the plan counts on {planned}")

    rank, least = min(tried.items(), key=lambda item: item[1])
    if rank is None:
        where = "here"
        remedy = "Start as many (--nnodes, --nproc-per-node), or plan for what is here."
    else:
        where = f"on rank {rank}"
        remedy = "Look at that rank's host, or write what it has into the plan's [cluster]."
    measured = f"{three_digits(least / need.unit_size)} {need.unit}".rstrip()
    line = f"{need.name:10}has {measured} {where}, the plan counts on {planned}"
    if least >= need.enough * need.planned:
        return Comparison(line)

    shortage = ""
    if need.enough < 1:
        shortage = f", less than {need.enough:.0%} of it"
    text = f"The plan counts on {planned} ({need.name}), and {where} is {measured}{shortage}."
    return Comparison(line, Problem(text, remedy))
