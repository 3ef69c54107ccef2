"""Run one probe in a process of its own, and make a record of what it yielded, however it ended."""

import json
from pathlib import Path

from helpers.verify.probes.catalog import Task
from helpers.verify.record import Figure, Probe
from helpers.verify.runs import TORCHRUN, Launcher, cause, threads_of_a_rank

PROGRAM = "helpers.verify.probes.process"


def measure(launcher: Launcher, task: Task, gpus: int) -> Probe:
    """Run a probe: on every GPU if it needs several, otherwise on the first; in a rehearsal on the CPU.

    What it yielded before it failed or hung is kept. Raises OutOfTime where the end of all steps came first.
    """
    results = launcher.folder / f"{task.name}.jsonl"
    device = "cpu" if launcher.rehearsal else "cuda"
    ranks = gpus if task.several_gpus else 1
    words = ["-m", PROGRAM, task.module, task.name, device, str(results)]
    if task.several_gpus:
        words = ["-m", *TORCHRUN, f"--nproc-per-node={ranks}", *words]
    variables = {"OMP_NUM_THREADS": launcher.threads or str(threads_of_a_rank(ranks, 1))}
    if launcher.rehearsal:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    finished = launcher.python(words, task.name, task.seconds, **variables)

    trouble = ""
    if finished.status is None:
        trouble = f"hung: it still ran after {task.seconds:g} s"
    elif finished.status != 0:
        trouble = f"failed: {cause(finished.errors)}"
    figures, texts = read_results(results)
    return Probe(task.title, figures, texts, trouble)


def read_results(path: Path) -> tuple[list[Figure], dict[str, str]]:
    """(figures, {name: text}) of the lines that a probe wrote; a last line that was cut is left out."""
    figures = []
    texts = {}
    if not path.exists():
        return [], {}
    for line in path.read_text("utf-8").split("\n")[:-1]:
        result = json.loads(line)
        if "figure" in result:
            figures.append(Figure(**result["figure"]))
        else:
            texts[result["text"]["name"]] = result["text"]["text"]
    return figures, texts
