"""``python -m helpers doctor``: alone, under real torchrun, and on ranks of which something is broken."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import cloudpickle
import leftovers
import pytest
import torch
import torch.distributed as dist
from slurm_cluster import STEP

from helpers.doctor import examine as doctor
from helpers.doctor import membership
from helpers.doctor.membership import Place
from helpers.doctor.plan import Plan
from helpers.doctor.trials import Speeds
from helpers.ranks.launch import RankError, launch, warm

ROOT = Path(__file__).parents[1]
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
COLLECTIVES = ["broadcast", "scatter", "gather", "reduce", "all_gather", "all_reduce", "reduce_scatter", "all_to_all"]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second


@pytest.fixture(autouse=True)
def environment():
    """The doctor sets a log level for the ranks that it starts. Here that ends with the test."""
    with mock.patch.dict(os.environ):
        yield


def check_report(out, count):
    """Check what every report on ``count`` healthy local ranks has."""
    lines = out.partition("\n\nThat was this machine alone.")[0].splitlines()
    assert max(map(len, lines)) <= 80 and not re.search(r"/\w+/", out.replace("/dev/shm", "")), out
    assert lines[0] == f"{count} rank{'s' * (count > 1)} on 1 host, gloo" and lines[-1] == "Nothing is wrong here."
    assert f"{LOOPBACK} 127.0.0.1" in out and f"torch {torch.__version__}" in out
    assert re.search(rf"^store .* reached by {count} of {count}$", out, re.MULTILINE)
    assert re.search(r"^clocks +(less than 1|at most \d{1,3}) ms apart$", out, re.MULTILINE)
    pairs = count * (count - 1) // 2
    assert f"{pairs} of {pairs} pairs right" in out or count == 1
    for name in COLLECTIVES:
        row = re.search(rf"^{name} +yes +(\d+) +([\d.]+)$" if count > 1 else rf"^{name} +yes$", out, re.MULTILINE)
        assert row and (count == 1 or float(row[2]) > 0), name


# --- real processes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def surroundings():
    """Environment variables without a launcher's. At the end, processes that a test has started must be gone."""
    with leftovers.surroundings() as environment:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "TORCHELASTIC_USE_AGENT_STORE"):
            environment.pop(name, None)
        yield {**environment, "CUDA_VISIBLE_DEVICES": ""}


def run(environment, *command):
    """The finished process of ``python -m command``."""
    line = [sys.executable, "-m", *command]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.ranks
def test_under_torchrun(surroundings):
    torchrun = ["torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command = [*torchrun, "--nproc-per-node=2", "-m", "helpers", "doctor"]
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # without a network c10d warns that its client's name is not found
    environment = {**surroundings, **quiet, "GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}
    done = run(environment, *command)
    assert (done.returncode, done.stderr) == (0, "")
    check_report(done.stdout, 2)

    done = run({**environment, "GLOO_SOCKET_IFNAME": "nowhere9"}, *command)
    flat = " ".join(done.stdout.split())
    assert "Ranks 0-1 should use the network interface nowhere9, which has no address." in flat
    assert re.search(r"starting a group on gloo failed on ranks 0-1: .*nowhere9", flat)
    assert "\nno process group: no collective was tried\n" in done.stdout and "2 problems found" in done.stdout
    assert len(re.findall(r"^ +exitcode", done.stderr, re.MULTILINE)) == 1  # torchrun tells of one rank
    assert done.returncode == 1


@pytest.mark.ranks
def test_alone(surroundings, tmp_path):
    """The command as the prose has it, but with a plan that asks for little."""
    tables = {
        "model": {"name": "tiny"},
        "cluster": {"gpu": "cpu", "gpus": 2, "nodes": 1, "peak": 1e6, "link_in_node": 1e3},
        "layout": {"dp": 2, "dtype": "float32"},
        "memory": {"limit": 1e6},
    }
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(tables))
    done = run(surroundings, "helpers", "doctor", "--plan", str(plan))
    assert (done.returncode, done.stderr) == (0, "")
    check_report(done.stdout, 2)
    rows = re.findall(r"^(.{10})has .*, the plan counts on \S+$", done.stdout, re.MULTILINE)
    assert [row.rstrip() for row in rows] == ["ranks", "nodes", "memory", "matmul", "in a node"]


@pytest.mark.ranks
def test_interrupted(surroundings):
    """Ctrl-C reaches the command alone, which ends its ranks."""
    command = [sys.executable, "-m", "helpers", "doctor", "--nproc", "2"]
    with subprocess.Popen(command, cwd=ROOT, env=surroundings, process_group=0, **PIPES) as process:
        mark = surroundings[leftovers.MARK]
        assert leftovers.wait_until(lambda: len(leftovers.processes(mark)) == 3)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "Interrupted; all ranks are stopped.\n")


@pytest.mark.ranks
def test_two_tasks_of_a_slurm_step(surroundings):
    """With Slurm's variables and without Slurm: rank 0 serves the store, and the other rank finds it."""
    with socket.socket() as holder:  # it keeps the port from others until rank 0 listens there
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        environment = {
            **surroundings,
            **STEP,
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "MASTER_PORT": str(holder.getsockname()[1]),
            "GLOO_SOCKET_IFNAME": LOOPBACK,
            "OMP_NUM_THREADS": "1",
        }
        tasks = []
        for rank in "01":
            environment |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
            command = [sys.executable, "-m", "helpers", "doctor", "--timeout", "60"]
            tasks.append(subprocess.Popen(command, cwd=ROOT, env=environment, **PIPES))
        (out, errors), nothing = (task.communicate(timeout=120) for task in tasks)
    assert [task.returncode for task in tasks] == [0, 0] and errors == "" and nothing == ("", "")
    check_report(out, 2)


def test_a_cluster_needs_torch_and_psutil_alone():
    more = "{'cloudpickle', 'matplotlib', 'nbformat'}"
    source = f"import sys, helpers.__main__, helpers.doctor.examine; print({more} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


# --- worlds in which something is broken ------------------------------------------------------------------------------


WORLDS = []


def world(statuses, *texts, wrong=(), problems=1, timeout=60, report=membership.REPORT_SECONDS):
    """A decorator for what each rank of a world does before it is examined; if it returns "absent", the rank leaves.

    ``statuses`` are those of the ranks, ``texts`` are patterns that the output has, whatever its line breaks, and
    ``wrong`` are the collectives whose row says NO. ``report`` replaces REPORT_SECONDS, where a wait is in vain.
    """

    def register(prepare):
        case = (prepare, statuses, texts, list(wrong), problems, timeout, report)
        WORLDS.append(pytest.param(*case, id=f"{prepare.__name__}-{len(statuses)}"))
        return prepare

    return register


def raises(error):
    """A function that raises the error, with any arguments."""

    def function(*args, **options):
        raise error

    return function


for number in (1, 4):

    @world([0] * number, problems=0)
    def a_healthy_world(rank):
        pass


for number in (0, 2):

    @world(
        [None if rank == number else 1 for rank in range(4)],
        f"Rank {number} of 4 did not come within 3 s\\.",
        "store .* reached by 3 of 4",
        "3 of 3 pairs right",  # the others were examined without it
        timeout=3,
    )
    def a_rank_that_never_comes(rank, absent=number):
        return "absent" if rank == absent else None


for number in (0, 1):

    @world(
        ["dead" if rank == number else 1 for rank in range(3)],
        rf"Rank {number} on \S+ stopped answering in the step: all_reduce\.",
        wrong=["all_reduce"],
        timeout=2,
        report=0.5,
    )
    def a_rank_that_is_gone_on_the_way(rank, victim=number):
        if rank == victim:
            dist.all_reduce = raises(SystemExit())


for number in (2, 3):  # of 2 ranks, one is left, and of 3, two

    @world([1] * number, r"Rank 0 should use the network interface nowhere9, which has no address\.")
    def rank_0_without_an_address(rank):
        if rank == 0:
            os.environ["GLOO_SOCKET_IFNAME"] = "nowhere9"


@world([1, 1, 1], "Rank 1 of 3 did not come", "The others went on without this rank", timeout=3)
def a_rank_that_comes_too_late(rank):
    time.sleep(6 * (rank == 1))


@world(
    [1, 1, 1],
    r"scatter failed on ranks 0-2: out of order\..* gather failed on .*?rank 1: out of order",
    r"all_reduce gave a wrong result on rank 2\.",
    "3 of 3 pairs right",
    wrong=["scatter", "gather", "all_reduce"],
    problems=3,
    timeout=3,
)
def collectives_that_raise_and_one_that_is_wrong(rank):
    right = dist.all_reduce

    def spoil(tensor, *args, **options):
        work = right(tensor, *args, **options)
        work.wait()
        tensor[len(tensor) // 2] += rank == 2
        return work

    dist.all_reduce = spoil
    dist.scatter = raises(RuntimeError("[/build/gloo/pair.cc:42] out of order\nand more"))
    if rank == 1:
        dist.gather = dist.scatter


@world(
    [1] * 4,
    "4 of 6 pairs right",
    r"failed on rank 0: with rank 1: cable cut; on rank 1: with rank 0: cable cut\.",
    "rank 0 - none",
    "Data between ranks 2 and 3 arrives changed",
    problems=2,
)
def a_link_that_raises_and_one_that_is_wrong(rank):
    exchange = dist.batch_isend_irecv

    def spoil(operations):
        if {rank, operations[0].peer} == {0, 1}:
            raise RuntimeError("cable cut")
        for work in exchange(operations):
            work.wait()
        operations[1].tensor[-1] += rank == 2 and operations[1].peer == 3
        return []

    dist.batch_isend_irecv = spoil


@world(
    [1, 1, 1],
    "4 of 6 connections between ranks open",
    r"Ranks 0, 2 cannot connect to rank 1 on \S+ \(\S+\): Connection refused\.",
    "1 of 1 pairs right",
    "others, which go on without it",
)
def an_address_that_takes_no_connection(rank):
    if rank == 1:
        facts = doctor.facts_of_rank
        silent = socket.socket()  # it has a port and does not listen there
        silent.bind(("127.0.0.1", 0))
        doctor.facts_of_rank = lambda *args: replace(facts(*args), port=silent.getsockname()[1])


@world(
    [1] * 4,
    "nodes +has 2, the plan counts on 2",
    r"in a node has \S+ GB/s on rank \d, the plan counts on 1e-06 between +has \S+ GB/s on rank \d, the plan counts on",
    r"Ranks 0-3 would listen on 127\.0\.0\.1",
)
def two_hosts_of_two_ranks_with_a_plan(rank):
    doctor.socket.gethostname = lambda: f"node{rank // 2}"
    plan = Plan("tiny on 4 x cpu", 4, 2, memory=1e6, dtype="float32", speeds=Speeds(1e6, 1e3, 1e3))
    run_rank = doctor.run_rank
    doctor.run_rank = lambda *args, **options: run_rank(*args, **options, plan=plan)


@pytest.mark.parametrize(("prepare", "statuses", "texts", "wrong", "problems", "timeout", "report"), WORLDS)
@pytest.mark.ranks
def test_worlds(prepare, statuses, texts, wrong, problems, timeout, report, capsys):
    """What is broken is named with its rank, and the rest is examined all the same.

    As with torchrun, the store is not a rank's: this process serves it.
    """
    store, count = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False), len(statuses)

    def rank(port):
        torch.set_num_threads(1)
        membership.REPORT_SECONDS = report
        dist.barrier()
        dist.destroy_process_group()
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        del os.environ["TORCHELASTIC_RUN_ID"]  # with which one rank of a host alone reports a failure
        number = int(os.environ["RANK"])
        try:
            if prepare(number) != "absent":
                return doctor.run_rank(Place(number, count, number, "127.0.0.1", port), timeout=timeout)
        except SystemExit:
            return "dead"

    warm()
    with leftovers.unchanged():
        assert launch(rank, store.port, nproc=count, timeout=timeout + 40) == statuses
    out = re.sub(r"^\[ranks? [^]]*\] ?", "", capsys.readouterr().out, flags=re.MULTILINE)
    flat = " ".join(out.split())
    assert [text for text in texts if not re.search(text, flat)] == [], out
    assert re.findall(r"^(\w+) +NO\b", out, re.MULTILINE) == wrong, out
    assert re.findall(r"^(\w+) +yes\b", out, re.MULTILINE) == [name for name in COLLECTIVES if name not in wrong], out
    if problems:
        assert re.search(rf"^{problems} problems? found$", out, re.MULTILINE), out
    else:
        check_report(out, count)


@pytest.mark.ranks
def test_a_rank_that_hangs_where_no_timeout_reaches_leaves(capsys):
    def hang():
        membership.REPORT_SECONDS = 0
        membership.Membership(None, 0, 2, timeout=0.05).attempt("sleep", lambda: time.sleep(100))

    with pytest.raises(RankError, match="exit code 1"):
        launch(hang, nproc=1)
    assert re.search(r"Timeout.*\n(.*\n)*.* in <lambda>", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("rank", "host", "message"),
    [
        (1, "127.0.0.1", "Nothing answered at 127.0.0.1:{} within 0.5 s: rank 0 did not start there"),
        (0, "127.0.0.1", "Port {} of 127.0.0.1 cannot be opened: "),
        (1, "no.such.host.invalid", "The host name no.such.host.invalid has no address here."),
    ],
)
def test_a_store_that_cannot_be_reached_or_served(rank, host, message, capsys, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.socket() as silent:  # it has the port and does not listen there
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        assert doctor.run_rank(Place(rank, 2, rank, host, port), timeout=0.5) == 1
    error = capsys.readouterr().err
    assert f": {message.format(port)}" in error and error.count("\n") == 1
