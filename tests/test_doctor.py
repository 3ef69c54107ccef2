"""``python -m helpers doctor``: alone, under real torchrun, and on ranks of which something is broken."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
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
from helpers.ranks.launch import RankError, launch, warm

ROOT = Path(__file__).parents[1]
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
COLLECTIVES = ["broadcast", "scatter", "gather", "reduce", "all_gather", "all_reduce", "reduce_scatter", "all_to_all"]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second


@pytest.fixture(autouse=True)
def environment():
    """The doctor sets a log level for the ranks that it starts. Here that ends with the test."""
    with mock.patch.dict(os.environ):
        yield


# --- real processes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def surroundings():
    """Environment variables without a launcher's. At the end, processes that a test has started must be gone."""
    with leftovers.surroundings() as environment:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS"):
            environment.pop(name, None)
        yield {**environment, "CUDA_VISIBLE_DEVICES": ""}


TORCHRUN = ["torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]


def run(environment, *command):
    """The finished process of ``python -m command``."""
    line = [sys.executable, "-m", *command]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


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


@pytest.mark.ranks
def test_under_torchrun(surroundings):
    command = [*TORCHRUN, "--nproc-per-node=2", "-m", "helpers", "doctor"]
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # without a network c10d warns that its client's name is not found
    done = run({**surroundings, **quiet, "GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}, *command)
    assert (done.returncode, done.stderr) == (0, "")
    check_report(done.stdout, 2)


@pytest.mark.ranks
def test_alone(surroundings):
    """The command as the prose has it."""
    done = run(surroundings, "helpers", "doctor")
    assert (done.returncode, done.stderr) == (0, "")
    check_report(done.stdout, 2)


@pytest.mark.ranks
def test_what_is_wrong_ends_torchrun_with_a_status(surroundings, tmp_path):
    script = tmp_path / "differs.py"
    script.write_text(
        textwrap.dedent("""
            import os, sys
            import torch
            from helpers.__main__ import main
            if os.environ["RANK"] == "1":
                torch.__version__ = "2.12.0"
            sys.exit(main(["doctor"]))
        """)
    )
    environment = {**surroundings, "GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = run(environment, *TORCHRUN, "--nproc-per-node=2", str(script))
    assert done.returncode == 1
    assert f"The ranks differ in torch: {torch.__version__} on rank 0; 2.12.0 on rank 1." in flat(done.stdout)
    assert done.stdout.endswith("1 problem found\n") and "reduce_scatter  yes" in done.stdout
    assert len(re.findall(r"^ +exitcode", done.stderr, re.MULTILINE)) == 1  # torchrun tells of one rank


@pytest.mark.ranks
def test_interrupted(surroundings):
    """Ctrl-C comes while the others wait for rank 1, which SIGSTOP has stopped."""
    command = [sys.executable, "-m", "helpers", "doctor", "--nproc", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=surroundings, process_group=0, **pipes) as process:
        mark = surroundings[leftovers.MARK]
        assert leftovers.soon(lambda: len(leftovers.processes(mark)) == 3)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "Interrupted; all ranks are stopped.\n")


def raises(error):
    """A function that raises the error, with any arguments."""

    def function(*args, **options):
        raise error

    return function


# --- worlds in which something is broken ------------------------------------------------------------------------------


def flat(text):
    """A text without its line breaks."""
    return re.sub(r"\s+", " ", text)


@pytest.fixture
def world(capsys):
    """A function that starts the doctor on local ranks and returns (statuses, output).

    Each rank first calls ``prepare()``; if that returns "absent", the rank does not come. As with torchrun, the store
    is not a rank's: this process serves it. ``report`` replaces REPORT_SECONDS, where a rank is waited for in vain.
    """

    def start(count, prepare, timeout=60, report=membership.REPORT_SECONDS):
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

        def rank(port):
            torch.set_num_threads(1)
            membership.REPORT_SECONDS = report
            dist.barrier()
            dist.destroy_process_group()
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            number = int(os.environ["RANK"])
            if prepare(number) == "absent":
                return None
            try:
                return doctor.run_rank(Place(number, count, number, "127.0.0.1", port), timeout=timeout)
            except SystemExit:
                return "dead"

        warm()
        with leftovers.unchanged():
            statuses = launch(rank, store.port, nproc=count, timeout=100)
        return statuses, re.sub(r"^\[ranks? [^]]*\] ?", "", capsys.readouterr().out, flags=re.MULTILINE)

    return start


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.ranks
def test_healthy_ranks(count, world):
    statuses, out = world(count, lambda rank: None)
    assert statuses == [0] * count
    check_report(out, count)


@pytest.mark.parametrize("absent", [0, 2])
@pytest.mark.ranks
def test_a_rank_that_never_comes_is_named_in_time(absent, world):
    def prepare(rank):
        gather = membership.Membership.gather

        def timed(self, step, *rest):
            start = time.monotonic()
            answers = gather(self, step, *rest)
            if step == "roll call":
                print(f"roll call: {time.monotonic() - start} s")
            return answers

        membership.Membership.gather = timed
        return "absent" if rank == absent else None

    statuses, out = world(4, prepare, timeout=3)
    assert statuses == [None if rank == absent else 1 for rank in range(4)]
    roll_calls = re.findall(r"roll call: (\S+) s", out)
    assert len(roll_calls) == 3 and all(float(seconds) < 60 for seconds in roll_calls), out
    assert f"Rank {absent} of 4 did not come within 3 s." in flat(out)
    assert "store" in out and "reached by 3 of 4" in out and "1 problem found" in out
    assert "3 of 3 pairs right" in out  # the others were examined without it
    assert all(re.search(rf"^{name} +yes ", out, re.MULTILINE) for name in COLLECTIVES)


@pytest.mark.ranks
def test_a_wrong_collective_is_named(world):
    def prepare(rank):
        if rank == 2:
            right = dist.all_reduce

            def wrong(tensor, *args, **options):
                work = right(tensor, *args, **options)
                work.wait()
                tensor[len(tensor) // 2] += 1
                return work

            dist.all_reduce = wrong

    statuses, out = world(3, prepare)
    assert statuses == [1, 1, 1]
    assert "all_reduce gave a wrong result on rank 2." in flat(out) and "1 problem found" in out
    assert re.findall(r"^(\w+) +NO ", out, re.MULTILINE) == ["all_reduce"]


@pytest.mark.ranks
def test_a_check_that_raises_on_all_ranks_or_on_one_does_not_prevent_the_others(world):
    def prepare(rank):
        broken = raises(RuntimeError("[/build/gloo/pair.cc:42] out of order\nand more"))
        dist.scatter = broken
        if rank == 1:
            dist.gather = broken

    statuses, out = world(2, prepare, timeout=3)
    assert statuses == [1, 1]
    assert "scatter failed on ranks 0-1: out of order." in flat(out)
    assert re.search("gather failed on .*?rank 1: out of order", flat(out).partition("scatter failed")[2])
    assert re.findall(r"^(\w+) +NO", out, re.MULTILINE) == ["scatter", "gather"]
    assert len(re.findall(r"^\w+ +yes ", out, re.MULTILINE)) == len(COLLECTIVES) - 2
    assert "1 of 1 pairs right" in out


@pytest.mark.ranks
def test_a_wrong_link_is_named(world):
    def prepare(rank):
        if rank == 1:
            exchange = dist.batch_isend_irecv

            def spoil(operations):
                works = exchange(operations)
                for work in works:
                    work.wait()
                operations[1].tensor[-1] += operations[1].peer == 2
                return []

            dist.batch_isend_irecv = spoil

    statuses, out = world(3, prepare)
    assert statuses == [1, 1, 1] and "2 of 3 pairs right" in out
    assert "Data between ranks 1 and 2 arrives changed" in flat(out) and "1 problem found" in out


@pytest.mark.ranks
def test_a_link_that_raises_is_named(world):
    def prepare(rank):
        exchange = dist.batch_isend_irecv

        def cut(operations):
            if {rank, operations[0].peer} == {0, 1}:
                raise RuntimeError("cable cut")
            return exchange(operations)

        dist.batch_isend_irecv = cut

    statuses, out = world(4, prepare)
    assert statuses == [1] * 4 and "5 of 6 pairs right" in out
    assert "failed on rank 0: with rank 1: cable cut; on rank 1: with rank 0: cable cut." in flat(out)
    assert "1 problem found" in out and "none" in out


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.ranks
def test_a_rank_that_is_gone_on_the_way_is_named(victim, world):
    def prepare(rank):
        if rank == victim:
            dist.all_reduce = raises(SystemExit())

    statuses, out = world(3, prepare, timeout=2, report=0.5)
    assert statuses == ["dead" if rank == victim else 1 for rank in range(3)]
    assert f"Rank {victim} on " in out and "stopped answering in the step: all_reduce." in flat(out)
    assert "1 problem found" in out and re.search(r"^all_to_all +yes", out, re.MULTILINE)


@pytest.mark.parametrize("absent", [0, 7])
def test_ranks_agree_when_any_one_is_lost(absent):
    """Threads with a store's client each: nothing of a process group is in this."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def rank(number):
        store = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
        member = membership.Membership(store, number, 8, timeout=60)
        clocks = doctor.compare_clocks(member)
        if number == absent:
            return None
        answers = member.gather("halfway", -number, patience=2)
        return answers, member.gather("the end", None).keys(), member.lost, clocks

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(rank, range(8)))
    assert results.pop(absent) is None
    answers, members, lost, clocks = results[0]
    assert all(result == results[0] for result in results)
    assert answers == {number: -number for number in range(8) if number != absent} and members == answers.keys()
    assert lost == {absent: "halfway"} and len(clocks) == 8 and clocks[0] == 0


@pytest.mark.ranks
def test_a_rank_that_hangs_where_no_timeout_reaches_leaves(capsys):
    def hang():
        with membership.Membership(None, 0, 2, 1).no_longer_than(0.1):
            time.sleep(100)

    with pytest.raises(RankError, match="exit code 1"):
        launch(hang, nproc=1)
    assert "rank 0 hangs; it leaves" in capsys.readouterr().out


@pytest.mark.ranks
def test_a_rank_that_comes_too_late_says_so(world):
    statuses, out = world(3, lambda rank: time.sleep(6 * (rank == 1)), timeout=3)
    assert statuses == [1, 1, 1]
    assert "Rank 1 of 3 did not come" in out and "The others went on without this rank" in out


@pytest.mark.ranks
def test_an_address_that_takes_no_connection_is_named(world):
    def prepare(rank):
        if rank == 1:
            facts = doctor.facts_of_rank
            silent = socket.socket()  # it has a port and does not listen there
            silent.bind(("127.0.0.1", 0))
            socket.create_server = raises(OSError("no more files"))
            doctor.facts_of_rank = lambda *args: replace(facts(*args), port=silent.getsockname()[1])

    statuses, out = world(3, prepare)
    assert statuses == [1, 1, 1] and "4 of 6 connections between ranks open" in out
    assert re.search(r"Ranks 0, 2 cannot connect to rank 1 on \S+ \(\S+\): Connection refused.", flat(out))
    assert "1 of 1 pairs right" in out and "others, which go on without it" in flat(out) and "1 problem found" in out


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.ranks
def test_rank_0_without_an_address_does_not_prevent_the_others(count, world):
    """Of 2 ranks, one is left, and of 3, two."""

    def prepare(rank):
        if rank == 0:
            os.environ["GLOO_SOCKET_IFNAME"] = "nowhere9"

    statuses, out = world(count, prepare)
    assert statuses == [1] * count
    assert "Rank 0 should use the network interface nowhere9, which has no address." in flat(out)
    assert "all_reduce      yes" in out and "1 problem found" in out


def test_store_that_nobody_serves(capsys):
    with socket.socket() as silent:  # it keeps the port from others, and does not listen there
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        place = Place(1, 2, 1, "127.0.0.1", port)
        assert doctor.run_rank(place, timeout=0.5) == 1
    error = capsys.readouterr().err
    assert f"Nothing answered at 127.0.0.1:{port} within 0.5 s" in error and error.count("\n") == 1


def test_port_that_is_taken(capsys, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        place = Place(0, 2, 0, "127.0.0.1", port)
        assert doctor.run_rank(place, timeout=1) == 1
    assert f"Port {port} of 127.0.0.1 cannot be opened" in capsys.readouterr().err


def test_name_without_an_address(capsys):
    place = Place(1, 2, 1, "no.such.host.invalid", 29500)
    assert doctor.run_rank(place, timeout=1) == 1
    assert "The host name no.such.host.invalid has no address here." in capsys.readouterr().err


# --- under srun, and with a plan --------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_two_tasks_of_a_slurm_step(surroundings):
    """With Slurm's variables and without Slurm: rank 0 serves the store, and the other rank finds it."""
    held = socket.socket()  # it keeps the port from others until rank 0 listens there
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    mine = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.1", "MASTER_PORT": str(port)}
    mine |= {"GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}
    tasks = []
    for rank in "01":
        environment = {**surroundings, **mine, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        command = [sys.executable, "-m", "helpers", "doctor", "--timeout", "60"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        tasks.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))
    (out, errors), nothing = (task.communicate(timeout=120) for task in tasks)
    held.close()
    assert [task.returncode for task in tasks] == [0, 0] and errors == "" and nothing == ("", "")
    check_report(out, 2)


def test_a_cluster_needs_torch_and_psutil_alone():
    more = "{'cloudpickle', 'matplotlib', 'nbformat'}"
    source = f"import sys, helpers.__main__, helpers.doctor.examine; print({more} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.mark.ranks
def test_a_plan_for_this_machine(surroundings, tmp_path):
    tables = {
        "model": {"name": "tiny"},
        "cluster": {"gpu": "cpu", "nodes": 1, "peak": 1e6, "link_in_node": 1e3},
        "layout": {"dp": 2, "dtype": "float32"},
        "memory": {"limit": 1e6},
    }
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(tables))
    done = run(surroundings, "helpers", "doctor", "--plan", str(plan))
    assert (done.returncode, done.stderr) == (0, "")
    check_report(done.stdout, 2)
    for label, unit in (("memory", "GB"), ("matmul", "TFLOP/s in float32"), ("in a node", "GB/s")):
        row = rf"^{label} +has (\S+) {unit} on rank [01], the plan counts on (\S+)$"
        has, wanted = map(float, re.search(row, done.stdout, re.MULTILINE).groups())
        assert has > 10 * wanted > 0
    assert "ranks     has 2, the plan counts on 2\n" in done.stdout


@pytest.mark.ranks
def test_what_two_hosts_have_between_them(world):
    plan = Plan("tiny", "cpu", 4, 2, memory=1e6, dtype="float32", matmul=1e6, in_node=1e3, between=1e3)

    def prepare(rank):
        doctor.socket.gethostname = lambda: f"node{rank // 2}"  # two ranks each
        run_rank = doctor.run_rank
        doctor.run_rank = lambda *args, **options: run_rank(*args, **options, plan=plan)

    statuses, out = world(4, prepare)
    assert re.search(r"^nodes +has 2, the plan counts on 2$", out, re.MULTILINE)
    for label in ("in a node", "between  "):
        assert re.search(rf"^{label} has \S+ GB/s on rank \d, the plan counts on 1e-06$", out, re.MULTILINE), out
