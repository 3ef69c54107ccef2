"""The order in which a verification takes its steps: the most valuable ones first, because it may be stopped."""

from collections import deque

from helpers.verify.probes import catalog
from helpers.verify.probes.catalog import Task

PROBES = {task.name: task for task in (*catalog.FIRST, *catalog.LATER)}
DOCTOR = "doctor"
LAUNCH = "launch on GPUs"
SCRIPTS_PER_PROBE = 2  # There are about twice as many scripts as probes that take turns with them.


def probes_of(names: list[str] | None, gpus: int) -> list[Task]:
    """The probes with these names, or all probes for None, without those that need more GPUs than there are."""
    chosen = []
    for task in PROBES.values():
        is_wanted = names is None or task.name in names
        is_possible = gpus > 1 or not task.several_gpus
        if is_wanted and is_possible:
            chosen.append(task)
    return chosen


def ordered(probes: list[Task], scripts: list[str]) -> list[str]:
    """The names of all steps in the order in which they are taken. Without scripts these are only the probes.

    First come the probes whose figures are predicted, then what programs print. After them the scripts and the other
    probes take turns: two scripts, a probe, and so on. The doctor and the checks of ``launch`` measure nothing for the
    book, so they come last.
    """
    early_tasks = (*catalog.FIRST, catalog.MESSAGES)
    early_probes = [task.name for task in probes if task in early_tasks]
    other_probes = [task.name for task in probes if task not in early_tasks]
    if not scripts:
        return early_probes + other_probes

    steps = list(early_probes)
    scripts_left = deque(scripts)
    probes_left = deque(other_probes)
    while scripts_left or probes_left:
        for _ in range(SCRIPTS_PER_PROBE):
            if scripts_left:
                steps.append(scripts_left.popleft())
        if probes_left:
            steps.append(probes_left.popleft())
    return [*steps, DOCTOR, LAUNCH]
