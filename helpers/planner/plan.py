"""One plan: what a job needs, before it runs. A dict of numbers in base units; report.py puts it into words."""

from dataclasses import dataclass, replace

from helpers.planner import failures, rates
from helpers.planner.cluster import cluster_of
from helpers.planner.communication import collectives
from helpers.planner.conventions import conventions_of
from helpers.planner.layout import layout_of
from helpers.planner.memory import NOT_COUNTED, memory
from helpers.planner.model import PlanError, from_table, model_of
from helpers.planner.step_time import COVERAGE, step_time

STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Job:
    """What the run is: its tokens, what a checkpoint costs, and what was measured, if anything."""

    tokens: float = 0  # of the whole run; 0 for not known
    save_seconds: float = 60  # of a checkpoint for which training stops: w
    restart_seconds: float = 300  # from a failure to the first new step: u0
    step_seconds: float = 0  # measured
    tokens_per_second: float = 0  # measured, of all GPUs

    def __post_init__(self):
        if self.step_seconds and self.tokens_per_second:
            raise PlanError("step_seconds and tokens_per_second say the same.\nGive one of them.")
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 0 or (name == "save_seconds" and not self.save_seconds):
                raise PlanError(f"{name} is {getattr(self, name)!r}.\nGive a number above 0.")


def limits(model, cluster, layout, conventions):
    """(fits, {kind: bytes} of the fullest stage, its number)."""
    stages = memory(model, layout, conventions)
    worst = max(range(len(stages)), key=lambda stage: stages[stage]["total"])
    return stages[worst]["total"] <= cluster.memory, stages, worst


def neighbours(model, cluster, layout):
    """[(what changes, Layout)]: one step away, and possible."""
    changes = []
    for up in ("dp", "tp", "pp", "cp"):
        for down in ("dp", "tp", "pp", "cp"):
            if up != down and getattr(layout, down) % 2 == 0:
                values = {up: 2 * getattr(layout, up), down: getattr(layout, down) // 2}
                changes.append((f"{up} = {values[up]}, {down} = {values[down]}", values))
    for size in (2 * layout.micro_batch, layout.micro_batch // 2):
        changes += [(f"micro_batch = {size}", {"micro_batch": size})] * (size > 0)
    for name, values in {
        "recompute": ("none", "selective", "full"),
        "zero": (0, 1, 2, 3),
        "sequence_parallel": (True, False),
        "interleave": (1, 2, 4),
    }.items():
        for value in values:
            if value != getattr(layout, name) and not (name == "sequence_parallel" and layout.tp == 1):
                changes.append((f"{name} = {str(value).lower()}", {name: value}))
    if layout.zero and not layout.shard and layout.data_ranks > cluster.gpus_per_node:
        changes.append((f"shard = {cluster.gpus_per_node}", {"shard": cluster.gpus_per_node}))
    elif layout.shard:
        changes.append(("shard = 0", {"shard": 0}))
    found = []
    for words, values in changes:
        try:
            found.append((words, replace(layout, **values).check(model, cluster)))
        except PlanError:
            continue
    return found


def try_next(model, cluster, layout, conventions):
    """(words, the layout one step away that fits and is fastest, its seconds), or (words, None, None)."""
    fits, stages, worst = limits(model, cluster, layout, conventions)
    now = step_time(model, layout, cluster, conventions).seconds
    tried, smallest = [], (stages[worst]["total"], None, None)
    for words, other in neighbours(model, cluster, layout):
        possible, found, fullest = limits(model, cluster, other, conventions)
        if possible:
            tried.append((step_time(model, other, cluster, conventions).seconds, words, other))
        smallest = min(smallest, (found[fullest]["total"], words, other), key=lambda one: one[0])
    if tried:
        seconds, words, other = min(tried, key=lambda one: one[0])
        if not fits or seconds < now:
            return words, other, seconds
        return f"stay: none of {len(tried)} layouts one step away is faster", None, None
    if smallest[1]:
        return f"{smallest[1]}: it does not fit either, but needs less", smallest[2], None
    return "more GPUs, or a smaller model: no layout one step away needs less memory", None, None


def binding(fits, stage, parts):
    """Which limit binds, and what is behind it: (limit, largest part)."""
    if not fits:
        kinds = {kind: size for kind, size in stage.items() if kind not in ("total", *STATES)}
        kinds["states"] = sum(stage[kind] for kind in STATES)
        return "memory", max(kinds, key=kinds.get)
    return "time", max(parts, key=parts.get)


def plan(model, cluster, layout, conventions=None, job=None):
    """The plan of one job, as a dict that json can write. Seconds, bytes, FLOP/s and shares in 0..1."""
    model, conventions = model_of(model), conventions_of(conventions)
    layout = layout_of(layout)
    cluster = cluster_of(cluster, 0 if not isinstance(cluster, str) else layout.gpus)
    layout.check(model, cluster)
    job = job if isinstance(job, Job) else from_table(Job, dict(job or {}), "the job")
    fits, stages, worst = limits(model, cluster, layout, conventions)
    step = step_time(model, layout, cluster, conventions)
    tokens = rates.tokens_per_step(model, layout)
    peak = conventions.peak or cluster.peak(layout.dtype)

    def utilization(seconds):
        mfu, hfu = rates.utilization(model, tokens / seconds, layout.gpus, peak, conventions.flops, layout.recompute)
        return {"mfu": mfu, "hfu": hfu, "achieved": (mfu if conventions.achieved == "model" else hfu) * peak}

    limit, largest = binding(fits, stages[worst], step.parts)
    words, other, seconds = try_next(model, cluster, layout, conventions)
    found = {
        "conventions": conventions.words(),
        "model": {
            "name": model.name,
            "parameters": model.parameters(),
            "active": model.parameters(active=True),
            "flops_per_token": model.flops_per_token(conventions.flops),
        },
        "cluster": {
            "gpu": cluster.gpu,
            "gpus": cluster.gpus,
            "nodes": cluster.nodes,
            "peak": peak,
            "link_in_node": cluster.link_in_node,
            "link_between": cluster.link_between,
        },
        "layout": changed(layout),
        "memory": {
            "stages": stages,
            "fullest": worst,
            "limit": cluster.memory,
            "fits": fits,
            "not_counted": NOT_COUNTED,
        },
        "collectives": sent_by(collectives(model, layout, cluster, conventions, stage=worst)),
        "step": {
            "seconds": step.seconds,
            "low": step.low,
            "high": step.high,
            "coverage": None if step.extrapolated else COVERAGE,
            "parts": step.parts,
            "extrapolated": step.extrapolated,
            "tokens": tokens,
            "tokens_per_second": tokens / step.seconds,
            "bubble": rates.bubble(layout.pp, layout.micro_batches, layout.interleave, conventions.bubble),
            **utilization(step.seconds),
        },
        "binds": {"limit": limit, "largest": largest},
        "next": {"words": words, "layout": changed(other) if other else None, "seconds": seconds},
    }
    measured = job.step_seconds or (tokens / job.tokens_per_second if job.tokens_per_second else 0)
    if measured:
        found["measured"] = {"seconds": measured, "error": step.seconds / measured - 1, **utilization(measured)}
    found["run"] = run_of(model, cluster, layout, conventions, job, measured or step.seconds, step)
    return found


def sent_by(found):
    """[{one kind of collective}] of the fullest stage's rank; seconds at the links' full speed, none of it hidden."""
    return [
        {
            "dimension": one.dimension,
            "kind": one.kind,
            "phase": one.phase,
            "what": one.what,
            "ranks": one.ranks,
            "count": one.count,
            "bytes": one.size,
            "sent": one.sent,
            "seconds": one.seconds(),
        }
        for one in found
    ]


def changed(layout):
    """{field: value} of a layout where it differs from the defaults, and always its sizes."""
    always = ("dp", "tp", "pp", "cp", "micro_batch", "batch")
    return {
        name: getattr(layout, name)
        for name, field in layout.__dataclass_fields__.items()
        if name in always or getattr(layout, name) != field.default
    }


def run_of(model, cluster, layout, conventions, job, seconds, step):
    """Days, failures, checkpoints, goodput and cost of the run."""
    rate, found = cluster.failures_per_node_day, {}
    goodput = 1.0
    if rate:
        hours = failures.mttf_hours(cluster.nodes, rate)
        every = failures.checkpoint_interval(job.save_seconds, cluster.nodes, rate)
        goodput = failures.goodput(cluster.nodes, rate, job.restart_seconds, every, job.save_seconds)
        found |= {
            "mttf_hours": hours,
            "save_seconds": job.save_seconds,
            "restart_seconds": job.restart_seconds,
            "checkpoint_every_seconds": every,
            "goodput": goodput,
        }
    if not job.tokens:
        return found
    if conventions.days == "8TP":
        peak = conventions.peak or cluster.peak(layout.dtype)
        per_gpu = rates.achieved(
            model, rates.tokens_per_step(model, layout) / seconds, layout.gpus, conventions.flops, layout.recompute
        )
        days = rates.training_days(
            model, job.tokens, layout.gpus, min(per_gpu, peak), "8TP", recompute=layout.recompute
        )
    else:
        days = job.tokens / rates.tokens_per_step(model, layout) * seconds / 86400
    found |= {"tokens": job.tokens, "steps": job.tokens / rates.tokens_per_step(model, layout), "days": days}
    if rate and goodput:
        wall = days / goodput
        count = wall * 24 / found["mttf_hours"]
        found |= {"days_with_failures": wall, "failures": count}
        found["failures_between"] = failures.poisson_counts(count)
    if cluster.price_per_gpu_hour and goodput:  # a run that never ends has no price
        hours = 24 * found.get("days_with_failures", days)
        found["cost"] = rates.cost(cluster.gpus, hours, cluster.price_per_gpu_hour)
    return found
