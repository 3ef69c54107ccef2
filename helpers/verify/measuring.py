"""Run one probe in a process of its own, and make a record of what it yielded, however it ended."""

import json

from helpers.verify.probes.catalog import Task
from helpers.verify.record import Figure, Probe
from helpers.verify.runs import TORCHRUN, Launcher, cause, threads_of_a_rank

PROGRAM = "helpers.verify.probes.process"


def measure(launcher: Launcher, task: Task, gpus: int) -> Probe:
    """Run a probe in a process of its own, and return what it measured and what became of it.

    It runs on every GPU if it needs several, otherwise on the first, and in a rehearsal of the verification on the CPU.
    What it measured before it failed or hung is kept. Raises OutOfTime where the end of all steps came first.
    """
    file_of_results = launcher.folder / f"{task.name}.jsonl"
    device = "cpu" if launcher.rehearsal else "cuda"
    words = ["-m", PROGRAM, task.module, task.name, device, str(file_of_results)]
    ranks = 1
    if task.several_gpus:
        ranks = gpus
        words = ["-m", *TORCHRUN, f"--nproc-per-node={ranks}", *words]
    variables = {"OMP_NUM_THREADS": launcher.threads or str(threads_of_a_rank(ranks, at_once=1))}
    if launcher.rehearsal:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    finished = launcher.python(words, task.name, task.seconds, **variables)

    trouble = ""
    if finished.status is None:
        trouble = f"hung: it still ran after {task.seconds:g} s"
    elif finished.status != 0:
        trouble = f"failed: {cause(finished.errors)}"
    probe = Probe(title=task.title, trouble=trouble)
    if file_of_results.exists():
        add_results(probe, file_of_results.read_text("utf-8"))
    return probe


def add_results(probe: Probe, written: str) -> None:
    """Add the figures and texts that a probe's process wrote, a line of JSON each (``probes.process``)."""
    *complete_lines, _ = written.split("\n")  # behind the last newline is nothing, or a line that was cut by a kill
    for line in complete_lines:
        result = json.loads(line)
        if "figure" in result:
            probe.figures.append(Figure(**result["figure"]))
        else:
            text = result["text"]
            probe.texts[text["name"]] = text["text"]
