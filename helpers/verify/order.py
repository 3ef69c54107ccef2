"""In which order a verification takes its steps, so that what is most valuable is there whenever it is stopped."""

from helpers.verify.probes import catalog
from helpers.verify.probes.catalog import Task

PROBES = {task.name: task for task in (*catalog.FIRST, *catalog.LATER)}
DOCTOR = "doctor"
LAUNCH = "launch on GPUs"
SCRIPTS_PER_PROBE = 2


def probes_of(names: list[str] | None, gpus: int) -> list[Task]:
    """The probes of these names, or all for None, that so many GPUs can run."""
    tasks = [task for task in PROBES.values() if names is None or task.name in names]
    return [task for task in tasks if gpus > 1 or not task.several_gpus]


def ordered(probes: list[Task], scripts: list[str]) -> list[str]:
    """The names of all steps in their order; without scripts only the probes.

    The figures for which there is a prediction come first, then what programs print. The other probes and the scripts
    take turns. The doctor and the checks of ``launch`` give no figure for the book, so they come last.
    """
    first = [task.name for task in probes if task in (*catalog.FIRST, catalog.MESSAGES)]
    later = [task.name for task in probes if task.name not in first]
    if not scripts:
        return first + later
    steps = first
    scripts_left = list(scripts)
    while later or scripts_left:
        steps += scripts_left[:SCRIPTS_PER_PROBE] + later[:1]
        scripts_left = scripts_left[SCRIPTS_PER_PROBE:]
        later = later[1:]
    return [*steps, DOCTOR, LAUNCH]
