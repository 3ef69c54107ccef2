"""Run one probe in a process of its own, and record what it measured, however it ended."""

import json

from helpers.verify.probes.catalog import Task
from helpers.verify.record import Figure, Probe
from helpers.verify.runs import TORCHRUN, Launcher, cause, threads_of_a_rank

PROGRAM = "helpers.verify.probes.process"
REHEARSAL_FACTOR = 4  # A rehearsal's CPU may have other work, so a probe gets as many times its seconds there.


def measure(launcher: Launcher, task: Task, gpus: int) -> Probe:
    """Run a probe in a process of its own, and return what it measured and whether it failed or hung.

    It runs on every GPU if it needs several, otherwise on the first one. If the verification is only rehearsed, it runs
    on the CPU. What it measured before it failed or hung is kept. Raises OutOfTime if the time for all steps is over
    first.
    """
    file_of_results = launcher.folder / f"{task.name}.jsonl"
    if launcher.rehearsal:
        device = "cpu"
    else:
        device = "cuda"
    words = ["-m", PROGRAM, task.module, task.name, device, str(file_of_results)]
    ranks = 1
    if task.several_gpus:
        ranks = gpus
        words = ["-m", *TORCHRUN, f"--nproc-per-node={ranks}", *words]
    variables = {"OMP_NUM_THREADS": launcher.threads or str(threads_of_a_rank(ranks, at_once=1))}
    if launcher.rehearsal:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    seconds = task.seconds
    if launcher.rehearsal:
        seconds *= REHEARSAL_FACTOR
    finished = launcher.python(words, task.name, seconds, **variables)

    trouble = ""
    if finished.status is None:
        trouble = f"hung: it still ran after {seconds:g} s"
    elif finished.status != 0:
        trouble = f"failed: {cause(finished.errors)}"
    probe = Probe(title=task.title, trouble=trouble)
    if file_of_results.exists():
        add_results(probe, file_of_results.read_text("utf-8"))
    return probe


def add_results(probe: Probe, written: str) -> None:
    """Add to a probe the figures and texts that its process wrote to a file, a line of JSON each (``probes.process``).

    ``written`` is the text of the file. If the process was killed, its last line may be cut off and without a newline.
    """
    complete_lines = written.split("\n")[:-1]
    for line in complete_lines:
        result = json.loads(line)
        if "figure" in result:
            probe.figures.append(Figure(**result["figure"]))
        else:
            text = result["text"]
            probe.texts[text["name"]] = text["text"]
