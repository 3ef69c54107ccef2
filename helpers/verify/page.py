"""The page of a verification, as Markdown: a function of the machine and of the steps' records."""

from collections.abc import Mapping, Sequence

from helpers.export.facts import Script
from helpers.verify.compare import UNCOMPARED
from helpers.verify.record import Step


def page(
    facts: Mapping[str, str],
    rehearsal: bool,
    steps: Mapping[str, Step],
    missing: Sequence[str],
    tolerances: Mapping[str, float],
) -> str:
    """The page. ``facts`` are rows of its first table, ``missing`` are names of steps that have not run.

    ``tolerances`` has the tolerance of each chapter's result.
    """
    text = [f"# The book on GPUs: {'rehearsed, not run on a GPU' if rehearsal else facts['machine'].split(';')[0]}", ""]
    text += ["| what | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
    text += ["", "## What differed from gloo, the pages' backend, and from the rehearsal", ""]
    lines = [f"- {name}: {line}" for name, step in steps.items() for line in step.differences]
    text += lines or ["Nothing."]
    if missing:
        text += ["", f"Not run yet: {', '.join(missing)}."]
    text += ["", f"{about(tolerances)} {UNCOMPARED}", "## Scripts", ""]
    text += ["The observer's counting takes some of the seconds.", ""]
    text += ["| command | result on GPUs | seconds on GPUs, on gloo | peak MB of the ranks |", "|---|---|---|---|"]
    for step in steps.values():
        if step.script_seconds:
            result = ", ".join(f"{name} {number:g}" for name, number in step.result.items())
            seconds = ", ".join(f"{each:.1f}" for each in step.script_seconds)
            text.append(
                f"| `{step.command}` | {result} | {seconds} | {', '.join(f'{m / 1e6:.0f}' for m in step.memory)} |"
            )
    for name, step in steps.items():
        if step.printed:
            text += ["", f"## {name}", "", f"`{step.command}`", "", "```text", step.printed.strip(), "```"]
    return "\n".join(text) + "\n"


def about(tolerances: Mapping[str, float]) -> str:
    """A sentence: the tolerance of results, and which chapters have another."""
    usual = Script.tolerance
    others = [f"{tolerance:g} in {name}" for name, tolerance in tolerances.items() if tolerance != usual]
    if not others:
        return f"The tolerance of results is {usual:g}."
    return f"The tolerance of results is {usual:g}, and {', '.join(others)}."
