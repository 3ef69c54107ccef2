"""In which order a verification does its work, so that what is most valuable is there whenever it is stopped."""

from collections.abc import Mapping

from helpers.export.facts import Script as ScriptFacts
from helpers.verify.probes import catalog
from helpers.verify.probes.catalog import Task

PROBES = {task.name: task for task in (*catalog.FIRST, *catalog.LATER)}
DOCTOR = "doctor"
LAUNCH = "launch on GPUs"
SPEED = ", speed"  # behind a script's name: the step in which it measures
SCRIPTS_PER_PROBE = 2


def probes_of(names: list[str] | None, gpus: int) -> list[Task]:
    """The probes of these names, or all for None, that so many GPUs can run."""
    tasks = []
    for task in PROBES.values():
        if names is None or task.name in names:
            if gpus > 1 or not task.several_gpus:
                tasks.append(task)
    return tasks


def ordered(probes: list[Task], scripts: Mapping[str, ScriptFacts], ranks: int, with_launch_checks: bool) -> list[str]:
    """The names of all steps in their order; without scripts only the probes.

    The figures for which there is a prediction come first, then what programs print. The other probes and the scripts
    take turns. One rank has no speed to measure beside what the probes measure. The checks of ``launch`` give no figure
    for the book, so they come last.
    """
    first = [task.name for task in probes if task in (*catalog.FIRST, catalog.MESSAGES)]
    later = [task.name for task in probes if task.name not in first]
    names = list(scripts)
    steps = first
    while later or names:
        steps += names[:SCRIPTS_PER_PROBE] + later[:1]
        names = names[SCRIPTS_PER_PROBE:]
        later = later[1:]
    if not scripts:
        return steps
    steps.append(DOCTOR)
    if ranks > 1:
        steps += [name + SPEED for name, facts in scripts.items() if facts.speed_flags]
    if with_launch_checks:
        steps.append(LAUNCH)
    return steps
