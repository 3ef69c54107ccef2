"""What complete jobs cost, for tools/bench.py: checkpoints, a pipeline's schedules, a restart, the planner."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
SAVES = {"no checkpoint": None, "one every 20 steps": 20, "one every step": 1}
SCHEDULES = ("gpipe", "1f1b", "interleaved")
RESTARTS = ("torchrun", "torchrun, looks more often", "ranks forked, imports done")


@contextlib.contextmanager
def exported(chapter):
    """A context with the path of a chapter's script; at its end the script's folder is removed."""
    with tempfile.TemporaryDirectory() as folder:
        export = [sys.executable, "-m", "helpers", "export", chapter, "--out", folder]
        subprocess.run(export, cwd=ROOT, check=True, capture_output=True)
        (script,) = Path(folder).glob("*.py")
        yield script


def loaded(path):
    """A script as a module, so that its functions can be called."""
    spec = importlib.util.spec_from_file_location("script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- checkpoints: the trainer's own loop, with and without them -------------------------------------------------------


def seconds_of_steps(path, folder, rounds):
    """On a rank: {way: [seconds per step in each round]} of the trainer's script, with and without checkpoints."""
    import torch
    import torch.distributed as dist

    sys.argv = [path, "--epochs=3", "--log-every=15"]
    script, device, found = loaded(path), torch.device("cpu"), {}
    args = script.parse_args()
    train_set, val_set = script.load_data(args)
    with contextlib.redirect_stdout(None):
        for number in range(rounds + 1):
            for way, every in SAVES.items():
                args.checkpoint_dir, args.save_every = f"{folder}/{number}-{every}" if every else "", every or 1
                dist.barrier()
                start = time.perf_counter()
                _, metrics = script.train(args, train_set, val_set, device)
                dist.barrier()
                found.setdefault(way, []).append((time.perf_counter() - start) / metrics["step"])
    return {way: seconds[1:] for way, seconds in found.items()}  # the first round warms up


def time_checkpoints(rounds=5, nproc=2):
    from helpers.ranks.launch import launch

    with exported("11") as script, tempfile.TemporaryDirectory() as folder:
        return launch(seconds_of_steps, str(script), folder, rounds, nproc=nproc, timeout=300)[0]


# --- a pipeline's schedules: the same stages and the same batch -------------------------------------------------------


def seconds_of_schedules(path, rounds, micro_batches):
    """On a rank: {schedule: [seconds of one step in each round]}; a step is forward and backward."""
    import torch
    import torch.distributed as dist

    script, device, found = loaded(path), torch.device("cpu"), {}
    images, labels = script.digits()[0][:96]
    grey, steps = script.grey_levels(images), {}
    for kind in SCHEDULES:
        stages = dist.get_world_size() * (2 if kind == "interleaved" else 1)
        parts = script.my_stages(32, 8, 0, stages, device)
        runner = script.make_runner(kind, parts, stages, micro_batches, device, script.next_pixel_loss)
        steps[kind] = runner, parts, stages
    for _ in range(rounds + 1):
        for kind, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            script.run_step(*step, grey, labels)
            dist.barrier()
            found.setdefault(kind, []).append(time.perf_counter() - start)
    return {kind: seconds[1:] for kind, seconds in found.items()}


def time_schedules(rounds=7, nproc=2):
    from helpers.ranks.launch import launch

    with exported("08") as script:
        return launch(seconds_of_schedules, str(script), rounds, 8, nproc=nproc, timeout=300)[0]


# --- a restart: from a rank's SIGKILL to the next step of the job -----------------------------------------------------

# torchrun as a library, with ranks forked from a process that has imported what they need.
PRELOADED = """\
import importlib, multiprocessing, sys
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def rank(*flags):
    script = importlib.import_module("{name}")
    sys.argv[1:] = flags
    script.main(script.parse_args())

if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["{name}", "torch._dynamo"])
    elastic_launch(LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node={nproc}, max_restarts=100, start_method="forkserver",
        rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1", monitor_interval=0.02,
        logs_specs=DefaultLogsSpecs(log_dir="logs"),
    ), rank)(*sys.argv[1:])
"""


def time_restarts(kills=2, nproc=2):
    """{way: [seconds from a kill to the next step]} of chapter 11's trainer, which saves every step."""
    found = {}
    with exported("11") as script:
        preloaded = script.with_name("preloaded.py")
        preloaded.write_text(PRELOADED.format(name=script.stem, nproc=nproc))
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={nproc}", "--max-restarts=100"]
        torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        commands = [*torchrun, script], [*torchrun, "--monitor-interval=0.02", script], [preloaded]
        for number, (way, command) in enumerate(zip(RESTARTS, commands, strict=True)):
            work = script.parent / f"work{number}"
            work.mkdir()
            flags = ["--epochs=1000", "--log-every=1", "--save-every=1", "--resume", f"--checkpoint-dir={work}"]
            found[way] = list(restarts([sys.executable, *command, *flags], script.parent, kills))
    return found


def restarts(command, folder, kills):
    """Kill the job's last rank ``kills`` times, each after ten steps. Returns [seconds to the next printed step]."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else new ranks may read dead ranks' addresses
    job = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    killed, steps = None, 0
    try:
        for line in job.stdout:
            if killed is None and line.startswith("step "):
                steps += 1
            if killed is not None and line.startswith("going on from"):
                steps = -1  # from here on, the new ranks print the steps
            elif steps == -1 and line.startswith("step "):
                yield time.monotonic() - killed
                killed, steps, kills = None, 0, kills - 1
            if killed is None and steps == 10:
                if not kills:
                    return
                started = psutil.Process(job.pid).children(recursive=True)
                victim = max(started, key=lambda one: one.create_time())  # ranks start after all other processes
                killed = time.monotonic()
                victim.kill()
        raise RuntimeError(f"the job ended: {command}")
    finally:
        for one in psutil.Process(job.pid).children(recursive=True):
            one.kill()
        job.kill()
        job.wait()


# --- the planner ------------------------------------------------------------------------------------------------------


def plan_published():
    """The plan of a published run: GPT-175B on 64 A100s (Korthikanti et al. 2023, table 3)."""
    from helpers.planner.plan import plan

    layout = {"tp": 8, "pp": 8, "interleave": 3, "batch": 64, "sequence_parallel": True, "recompute": "selective"}
    found = plan("gpt-175b", "a100", {**layout, "attention": "scores"})
    assert 10 < found.step.seconds < 20, found.step  # 13.75 were measured


def search_layouts():
    from helpers.planner.cluster import cluster_of
    from helpers.planner.search import search

    found = search("llama3-70b", cluster_of("h100", 1024), 1024)
    assert found.best.layout.gpus == 1024


def trace_ranks():
    from helpers.planner.layout import Layout
    from helpers.planner.model import model_of
    from helpers.planner.trace import trace

    found = trace(model_of("llama3-70b"), Layout(dp=2048, tp=8, zero=3))
    assert found.world == 16384 and found.first.numbers > found.divided


TRACE = "a trace of 16,384 ranks"
PLANNER = {  # what is done, and calls in one interpreter
    "a plan, 64 GPUs": (plan_published, 11),
    "a search of layouts, 1,024 GPUs": (search_layouts, 4),
    TRACE: (trace_ranks, 4),
}


def time_planner(task):
    """{"first call": [seconds with the imports], "later call": [seconds]}."""
    function, calls = PLANNER[task]
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return {"first call": seconds[:1], "later call": seconds[1:]}


# The mean errors that the authors of other tools published, in percent.
PUBLISHED_ERRORS = (
    ("vTrain {cite}`bang2024vtrain`", "its runs on many nodes, with these 88 steps", "14.73"),
    ("Calculon {cite}`isaev2023calculon`", "eight other published steps", "3.65"),
)


def accuracy():
    """[row] of the mean errors of predicted step times: the planner's for sizes left out of its fit, and published."""
    from helpers.planner.experiments.vtrain import left_out, mean_error

    sizes = left_out()
    found = [("this planner", f"{one.steps} steps of {one.size} on {one.gpus} A100s", one.error) for one in sizes]
    found.append(("this planner", f"all {sum(one.steps for one in sizes)} steps", mean_error(sizes)))
    rows = [(tool, what, f"{100 * error:.1f}") for tool, what, error in found]
    return [
        {"Tool": tool, "Predicted": what, "Mean error": f"{error} %"}
        for tool, what, error in rows + [*PUBLISHED_ERRORS]
    ]
