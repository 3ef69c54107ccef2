"""Measure this project beside other ways to do the same work; `make bench` runs it.

Every round runs every contender once, each in an interpreter of its own, so that a slow minute of the machine slows all
of them. The tables show medians and spreads; all numbers go to a JSON file. ``--record`` writes the tables of
book/bench.md, too.
"""

import argparse
import contextlib
import inspect
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import bench_jobs
import bench_record
from bench_jobs import exported, loaded
from rehearse_all import result

from helpers.ranks.ports import hold_port

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "04_ddp.ipynb"
SIZES = (2, 4, 8)
CALLS = {"launch": 8, "mp.spawn": 2, "accelerate": 4, "torchrun": 2}  # calls in one interpreter, the first one apart
IPYPARALLEL = 4  # engines: each takes as long to start as a rank of mp.spawn
PAIRS, EPOCHS = 100, 4  # of the script and the loop by hand, in one round
GPUS = 8  # pretended
TRACE_LIMIT = 10  # seconds


# --- the same work for all: an all-reduce of a small tensor, its result brought back ----------------------------------


def all_reduce():
    """All-reduce [1] of rank + 1 on a rank whose process group runs: returns 1 + 2 + … + N."""
    import torch
    import torch.distributed as dist

    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def with_group(rank, world_size, store):
    """``all_reduce`` in a process without a group. ``store`` is the file by which the N processes meet."""
    import torch.distributed as dist

    start_group(rank, world_size, store)
    result = all_reduce()
    dist.barrier()
    dist.destroy_process_group()
    return result


def start_group(rank, world_size, store):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)


def check(results, nproc):
    assert list(results) == [nproc * (nproc + 1) / 2] * nproc, results


def use_openmp():
    """Multiply matrices on two threads, as a notebook's kernel has done by the time it starts ranks."""
    import torch

    torch.set_num_threads(2)
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)


# --- contenders: each yields a function that makes one call on nproc ranks --------------------------------------------


@contextlib.contextmanager
def by_launch(nproc):
    from helpers.ranks.launch import launch, warm

    warm()  # as `%load_ext helpers` does in a chapter's first cell
    import torch  # noqa: F401

    use_openmp()
    yield lambda: launch(all_reduce, nproc=nproc)


def spawned(rank, nproc, store, queue):
    queue.put((rank, with_group(rank, nproc, store)))


@contextlib.contextmanager
def by_spawn(nproc):
    import torch.multiprocessing as mp

    use_openmp()

    def call():
        queue = mp.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(spawned, (nproc, f"{folder}/store", queue), nprocs=nproc)
        return [result for _, result in sorted(queue.get() for _ in range(nproc))]

    yield call


@contextlib.contextmanager
def by_accelerate(nproc):
    """accelerate's notebook_launcher. It forks, and the ranks hang if the caller has used OpenMP: here it has not."""
    import torch.multiprocessing as mp
    from accelerate import notebook_launcher

    def forked(store, queue):
        rank = int(os.environ["RANK"])
        queue.put((rank, with_group(rank, nproc, store)))

    def call():
        queue = mp.get_context("fork").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None), hold_port() as port:
            notebook_launcher(forked, (f"{folder}/store", queue), num_processes=nproc, use_port=str(port))
        return [result for _, result in sorted(queue.get() for _ in range(nproc))]

    yield call


@contextlib.contextmanager
def by_torchrun(nproc):
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(
            f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import bench, os, pathlib\n"
            "rank, size, folder = int(os.environ['RANK']), int(os.environ['WORLD_SIZE']), pathlib.Path(sys.argv[1])\n"
            "(folder / str(rank)).write_text(str(bench.with_group(rank, size, folder / 'store')))\n"
        )

        def call():
            with tempfile.TemporaryDirectory(dir=folder) as results:
                torchrun(nproc, script, results)
                return [float(Path(results, str(rank)).read_text()) for rank in range(nproc)]

        yield call


def torchrun(nproc, *command):
    """Run a script on nproc ranks of this machine; return what it printed."""
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}", "--master-addr=127.0.0.1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback()}
    with hold_port() as port:
        line = [*start, f"--master-port={port}", *command]
        done = subprocess.run(line, env=environment, check=True, capture_output=True, text=True, timeout=300)
    return done.stdout


def loopback():
    return "lo0" if sys.platform == "darwin" else "lo"


def time_calls(contender, nproc):
    """[seconds] of every call in this interpreter, in order."""
    by = {"launch": by_launch, "mp.spawn": by_spawn, "accelerate": by_accelerate, "torchrun": by_torchrun}
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    seconds = []
    with by[contender](nproc) as call:
        for _ in range(CALLS[contender]):
            start = time.perf_counter()
            check(call(), nproc)
            seconds.append(time.perf_counter() - start)
    return {"first": seconds[:1], "later": seconds[1:]}


def time_ipyparallel(calls=8):
    """{what: [seconds]} of ipyparallel: the engines' start, calls that make a group, calls on a group that is kept."""
    import ipyparallel

    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    seconds = {"first": [], "later": [], "kept": []}
    nproc = IPYPARALLEL

    def on_engines(code):
        """What ``code`` evaluates to on each engine; RANK in it stands for the engine's number."""
        pending = [engine.apply_async(eval, code.replace("RANK", str(rank))) for rank, engine in enumerate(engines)]
        return [one.get(timeout=60) for one in pending]

    def timed(kind, code, start=None):
        start = start or time.perf_counter()
        check(on_engines(code), nproc)
        seconds[kind].append(time.perf_counter() - start)

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        with ipyparallel.Cluster(n=nproc, log_level=40, profile_dir=folder) as client:
            engines = [client[rank] for rank in range(nproc)]
            path = str(ROOT / "tools")
            on_engines(f"__import__('sys').path.insert(0, {path!r}) or __import__('torch').set_num_threads(1)")
            group = f"__import__('bench').with_group(RANK, {nproc}, '{folder}/store-"
            timed("first", f"{group}first')", start)  # with the start of the engines
            for number in range(calls):
                timed("later", f"{group}{number}')")
            on_engines(f"__import__('bench').start_group(RANK, {nproc}, '{folder}/kept')")
            for _ in range(calls):
                timed("kept", "__import__('bench').all_reduce()")
    return seconds


# --- a rank that fails: from its last line to the exception in the caller ---------------------------------------------


def fail(how, path):
    """On a rank: rank 1 writes the time to ``path`` and fails, while its peers wait in a collective."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        time.sleep(0.3)
        Path(path).write_text(str(time.monotonic()))
        if how == "raise":
            raise ValueError("the cause")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def fail_spawned(rank, nproc, store, how, path):
    start_group(rank, nproc, store)
    fail(how, path)


def time_failures(contender, nproc=4):
    """{how a rank fails: [seconds]} from the failure until the caller has its exception and the ranks are gone."""
    import torch.multiprocessing as mp

    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    use_openmp()
    seconds = {"raise": [], "SIGKILL": []}
    for _ in range(5 if contender == "launch" else 1):
        for how in seconds:
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
                try:
                    if contender == "launch":
                        from helpers.ranks.launch import launch

                        launch(fail, how, f"{folder}/time", nproc=nproc)
                    else:
                        mp.spawn(fail_spawned, (nproc, f"{folder}/store", how, f"{folder}/time"), nprocs=nproc)
                    raise SystemExit("nothing failed")
                except Exception:
                    seconds[how].append(time.monotonic() - float(Path(folder, "time").read_text()))
    return seconds


# --- a notebook's verification ----------------------------------------------------------------------------------------


def time_notebook(runner, notebook):
    """{runner: [seconds]} to run a copy of the notebook. nbval compares the outputs; nbconvert only executes cells."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(notebook, folder)
        if runner == "nbval":
            command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval", "--nbval-current-env", copy]
            command += [f"--nbval-sanitize-with={ROOT / 'tests/nbval_sanitize.cfg'}"]
        else:
            command = ["-m", "jupyter", "execute", copy]
        start = time.perf_counter()
        done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
        seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{runner} failed on {notebook.name}:\n{(done.stdout + done.stderr)[-2000:]}")
    return {runner: [seconds]}


# --- the exported script and a loop written by hand -------------------------------------------------------------------


def hand_written(script, train_set, val_set, epochs, batch_size, lr, seed, device):
    """The shortest DDP loop that does the script's work: same model and data, and validation after every epoch."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, Subset

    torch.manual_seed(seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(train_set, seed=seed, drop_last=True)
    loader = DataLoader(train_set, batch_size // world_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), 256)
    model = DistributedDataParallel(script.mlp().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        totals = torch.zeros(3, device=device)
        with torch.no_grad():
            for x, y in val_loader:
                logits, y = model.module(x.to(device)), y.to(device)
                loss = F.cross_entropy(logits, y, reduction="sum")
                totals += torch.stack([(logits.argmax(1) == y).sum(), loss, torch.tensor(len(y), device=device)])
        dist.all_reduce(totals)


def compare_script(path, results, pairs=PAIRS, epochs=EPOCHS):
    """Under torchrun: train by the exported script's function and by hand, in turn, in the same processes.

    The ratio of one pair varies by 13 %, so it takes hundreds of pairs to see 2 %.
    """
    import torch.distributed as dist

    script = loaded(path)
    sys.argv = [str(path), f"--epochs={epochs}"]
    settings = vars(script.parse_args()) | {"device": script.start_process_group()}
    settings["train_set"], settings["val_set"] = script.digits()
    names = inspect.signature(script.train).parameters
    settings = {name: settings[name] for name in names}
    seconds = {"script": [], "by hand": []}
    ways = {"script": lambda: script.train(**settings), "by hand": lambda: hand_written(script, **settings)}
    with contextlib.redirect_stdout(None):
        for pair in range(pairs + 1):
            for name in sorted(ways, reverse=pair % 2):
                dist.barrier()
                start = time.perf_counter()
                ways[name]()
                dist.barrier()
                seconds[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps({name: values[1:] for name, values in seconds.items()}))  # no warm-up
    os._exit(0)


def time_script():
    """{way: [seconds of each repetition]} on two ranks."""
    with exported("04") as script:
        results = script.with_name("results")
        torchrun(2, __file__, "--child", json.dumps(["compare_script", str(script), str(results)]))
        return json.loads(results.read_text())


# --- a rehearsal and the same script on gloo --------------------------------------------------------------------------


def time_rehearsal(way):
    """{way: [seconds]} of chapter 4's script on 8 ranks: with pretended GPUs, or on the CPU."""
    with exported("04") as script:
        start = time.perf_counter()
        if way == "rehearsal":
            command = [sys.executable, "-m", "helpers", "rehearse", str(script), "--gpus", str(GPUS)]
            done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
            out = done.stdout
        else:
            out = torchrun(GPUS, str(script))
        seconds = time.perf_counter() - start
    assert result(out)["world_size"] == GPUS, out
    return {way: [seconds]}


# --- rounds and the tables --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A function that returns {kind: [seconds]}, and where each kind stands: {kind: (measure, row)} of a table."""

    table: str
    places: dict
    function: object
    args: tuple
    once: bool = False  # in the first round only


def contenders(notebook):
    """[Contender] in the order in which a round runs them. The first row of a measure is the one with the ratio 1."""
    found = []

    def add(table, measure, row, kinds, function, *args, once=False):
        """A {} in the measure or the row becomes the kind."""
        places = {kind: (measure.format(kind), row.format(kind)) for kind in kinds}
        found.append(Contender(table, places, function, args, once))

    for nproc in SIZES:
        for way in CALLS:
            slow = nproc == max(SIZES) and way in ("mp.spawn", "torchrun")
            kinds = ("first", "later")
            add("calls", f"{{}} call, {nproc} ranks", way, kinds, child, "time_calls", way, nproc, once=slow)
        if nproc == IPYPARALLEL:
            add("calls", f"{{}} call, {nproc} ranks", "ipyparallel", ("first", "later"), child, "time_ipyparallel")
            found[-1].places["kept"] = f"later call, {nproc} ranks", "ipyparallel, group kept"
    for way in ("launch", "mp.spawn"):
        add("calls", "a rank fails: {}", way, ("raise", "SIGKILL"), child, "time_failures", way)
    for runner in ("nbval", "nbclient"):
        add("jobs", f"all of {notebook.name}", "{}", (runner,), time_notebook, runner, notebook, once=True)
    add("jobs", f"{EPOCHS} epochs of chapter 4, 2 ranks", "{}", ("script", "by hand"), time_script)
    add("jobs", "a step of the trainer, 2 ranks", "{}", bench_jobs.SAVES, child, "time_checkpoints")
    add("jobs", "a pipeline's step, 2 ranks", "{}", bench_jobs.SCHEDULES, child, "time_schedules")
    add("jobs", "SIGKILL to the next step", "{}", bench_jobs.RESTARTS, child, "time_restarts")
    for task in bench_jobs.PLANNER:
        add("planner", task, "{}", ("first call", "later call"), child, "time_planner", task)
    for way in ("gloo", "rehearsal"):
        add("planner", f"chapter 4's script, {GPUS} ranks", "{}", (way,), time_rehearsal, way)
    return found


def child(name, *args):
    """Call a function of this file or of bench_jobs in a new interpreter; return its result."""
    command = [sys.executable, __file__, "--child", json.dumps([name, *args])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{name}{args} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(rounds, chosen):
    """({measure: {row: [seconds]}}, {(measure, row): rounds that failed}) of all rounds of these contenders."""
    found, failed = {}, {}
    for measure, row in [place for one in chosen for place in one.places.values()]:
        found.setdefault(measure, {})[row] = []
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for one in [one for one in chosen if not (number and one.once)]:
            start, name = time.monotonic(), ": ".join(next(iter(one.places.values())))
            try:
                seconds = one.function(*one.args)
                assert set(seconds) == set(one.places), f"{set(seconds)} instead of {set(one.places)}"
            except Exception as error:
                print(f"  failed: {name}: {(str(error).strip().splitlines() or [error])[-1]}", file=sys.stderr)
                for place in one.places.values():
                    failed[place] = failed.get(place, 0) + 1
                continue
            for kind, (measure, row) in one.places.items():
                found[measure][row].extend(seconds[kind])
            print(f"  {time.monotonic() - start:4.0f} s  {name}", file=sys.stderr, flush=True)
    return found, failed


def targets(found):
    """Yields (target in words, measured value, limit, whether it is met) for each target; None if not measured."""

    def middle(measure, row):
        numbers = found.get(measure, {}).get(row)
        return statistics.median(numbers) if numbers else float("nan")

    epochs, trace = f"{EPOCHS} epochs of chapter 4, 2 ranks", bench_jobs.TRACE
    later, first = middle("later call, 4 ranks", "launch"), middle("first call, 4 ranks", "launch")
    killed = {way: middle("a rank fails: SIGKILL", way) for way in ("launch", "mp.spawn")}
    checks = [
        ("a later launch takes at most 1/20 of mp.spawn", later / middle("later call, 4 ranks", "mp.spawn"), 1 / 20),
        (
            "and less than a call of ipyparallel's warm engines",
            later / middle("later call, 4 ranks", "ipyparallel"),
            0.95,
        ),
        ("a first launch takes at most 1/2 of mp.spawn", first / middle("first call, 4 ranks", "mp.spawn"), 1 / 2),
        ("a rank's exception arrives within 0.5 s", middle("a rank fails: raise", "launch"), 0.5),
        ("a killed rank is told no later than by mp.spawn", killed["launch"] / killed["mp.spawn"], 1),
        (
            "the script is at most 2 % slower than by hand",
            1 - middle(epochs, "by hand") / middle(epochs, "script"),
            0.02,
        ),
        (f"{trace} takes less than {TRACE_LIMIT} s", middle(trace, "first call"), TRACE_LIMIT),
    ]
    for text, value, limit in checks:
        yield (text, None, limit, None) if value != value else (text, value, limit, value <= limit)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="repetitions, interleaved (default: 3)")
    parser.add_argument("--json", type=Path, default=ROOT / "_build" / "bench.json", help="default: _build/bench.json")
    parser.add_argument("--notebook", type=Path, help="default: notebooks/04_ddp.ipynb")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="measures with this in their name: call, fails, step, trace"
    )
    parser.add_argument("--record", action="store_true", help="write the tables of book/bench.md; takes all measures")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, *rest = json.loads(args.child)
        function = globals().get(name) or getattr(bench_jobs, name)
        print("\n" + json.dumps(function(*rest)))
        return
    if args.record and (args.only or args.notebook):
        parser.error("--record takes all measures of the default notebook: leave out --only and --notebook")
    machine = bench_record.machine(args.rounds)  # first, for the load at the start
    every = contenders((args.notebook or NOTEBOOK).resolve())
    chosen = [one for one in every if any(args.only in measure for measure, _ in one.places.values())]
    start = time.monotonic()
    found, failed = measure(args.rounds, chosen)
    machine["it took"] = f"{(time.monotonic() - start) / 60:.0f} minutes"
    tables = bench_record.tables(chosen, found, failed)
    tables |= {"accuracy": bench_jobs.accuracy(), "targets": bench_record.verdicts(targets(found))}
    tables["machine"] = [{"What": name, "Here": value} for name, value in machine.items()]
    for rows in tables.values():
        print(bench_record.text(rows))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"machine": machine, "targets": list(targets(found)), "numbers": found}, indent=1))
    print(f"All numbers are in {os.path.relpath(args.json)}.")
    if args.record:
        bench_record.write(tables)


if __name__ == "__main__":
    main()
