"""A plan in words: text of at most 100 columns. Pure."""

from helpers.command_line import aligned
from helpers.planner.conventions import GIGA


def of_time(seconds):
    """Seconds in the unit that is easy to read."""
    for name, size in (("days", 86400), ("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if seconds >= 2 * size or (name == "s" and seconds >= 1):
            return f"{seconds / size:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"


def of_days(days):
    """Days with three digits that say something."""
    return f"{float(f'{days:.3g}'):,g} days"


def of_bytes(size):
    for name, unit in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


def memory_lines(memory, unit):
    """The first, the fullest and the last stage by kind."""
    stages = memory["stages"]
    shown = sorted({0, memory["fullest"], len(stages) - 1})
    kinds = list(dict.fromkeys(kind for stage in stages for kind in stage))
    kinds.sort(key="total".__eq__)
    rows = [[unit] + [f"stage {stage}" for stage in shown]]
    for kind in kinds:
        rows.append([kind] + [f"{stages[stage].get(kind, 0) / GIGA[unit]:.2f}" for stage in shown])
    yield from (f"  {line}" for line in aligned(rows, left=[0]))
    word = "fits in" if memory["fits"] else "does not fit in"
    yield f"  {word} {memory['limit'] / GIGA[unit]:.1f} {unit} of a GPU; not counted: {memory['not_counted']}"


def lines(found):
    """The report of a plan, line by line."""
    model, cluster, step, run = found["model"], found["cluster"], found["step"], found["run"]
    switches = found["conventions"]
    active = f" ({model['active']:,} active)" if model["active"] != model["parameters"] else ""
    yield f"{model['name']}: {model['parameters']:,} parameters{active}; {model['flops_per_token']:.4g} FLOPs a token"
    yield f"{cluster['gpus']} x {cluster['gpu']} in {cluster['nodes']} nodes, {cluster['peak'] / 1e12:.4g} TFLOP/s each"
    yield "layout: " + ", ".join(f"{name} {str(value).lower()}" for name, value in found["layout"].items())
    yield "conventions: " + ", ".join(f"{name} {value}" for name, value in switches.items())
    yield "memory of a rank"
    yield from memory_lines(found["memory"], switches["memory"])
    if found["collectives"]:
        stage = found["memory"]["fullest"]
        yield f"collectives of a step, on a rank of stage {stage}; seconds at the links' full speed"
        rows = [["", "ranks", "count", "size", "sent in all", "seconds"]]
        for one in found["collectives"]:
            words = f"{one['dimension']} {one['kind']}, {one['phase']}: {one['what']}"
            sizes = [of_bytes(one["bytes"]), of_bytes(one["sent"]), of_time(one["seconds"])]
            rows.append([words, f"{one['ranks']}", f"{one['count']}", *sizes])
        yield from (f"  {line}" for line in aligned(rows, left=[0]))
    between = f"{of_time(step['low'])} to {of_time(step['high'])}"
    between += f" in {step['coverage']:.0%}" if step["coverage"] else ", extrapolated: how often is not known"
    yield f"step: {of_time(step['seconds'])} ({between}), {step['tokens_per_second']:,.0f} tokens/s"
    parts = sorted(step["parts"].items(), key=lambda part: -part[1])
    yield "  " + ", ".join(f"{name} {of_time(seconds)}" for name, seconds in parts if seconds)
    if step["extrapolated"]:
        yield f"  not among the fitted steps: {step['extrapolated']}"
    yield (
        f"  bubble {step['bubble']:.1%} of the {switches['bubble']} time; MFU {step['mfu']:.1%}, HFU {step['hfu']:.1%} "
        f"by {switches['flops']}"
    )
    if measured := found.get("measured"):
        yield (
            f"measured: {of_time(measured['seconds'])} a step, the prediction is {measured['error']:+.1%} off; "
            f"MFU {measured['mfu']:.2%}, HFU {measured['hfu']:.2%}, {measured['achieved'] / 1e12:.4g} TFLOP/s a GPU"
        )
    if "days" in run:
        yield f"run: {run['tokens']:.4g} tokens, {run['steps']:,.0f} steps, {of_days(run['days'])} without failures"
    if "mttf_hours" in run:
        between, every = of_time(run["mttf_hours"] * 3600), of_time(run["checkpoint_every_seconds"])
        yield (
            f"failures: one in {between}; save every {every} "
            f"(a save takes {of_time(run['save_seconds'])}, a restart {of_time(run['restart_seconds'])}); "
            f"goodput {run['goodput']:.1%}"
        )
    if "failures" in run:
        low, high = run["failures_between"]
        days, count = of_days(run["days_with_failures"]), f"{run['failures']:.0f}"
        yield f"  {days} with about {count} failures ({low} to {high} in 95 %)"
    if "cost" in run:
        yield f"cost: {run['cost']:,.0f} in the price's currency"
    yield f"what binds: {found['binds']['limit']}, most of it {found['binds']['largest']}"
    seconds = f" ({of_time(found['next']['seconds'])} a step)" if found["next"]["seconds"] else ""
    yield f"try next: {found['next']['words']}{seconds}"
