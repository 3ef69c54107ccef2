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
from pathlib import Path
from unittest import mock

import cloudpickle
import leftovers
import pytest
import torch
import torch.distributed as dist

from helpers.__main__ import main
from helpers.doctor import examine as doctor
from helpers.doctor import membership, this_rank, trials
from helpers.doctor.plan import read_plan
from helpers.doctor.report import notes, problems, report, span
from helpers.planner.plan import plan as planned
from helpers.planner.report import tables
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


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--timeout", "soon"], "'soon' is not a number of seconds"),
        (["--timeout", "-1"], "'-1' is not a number"),
        (["--nproc", "0"], "'0' is not a whole number above 0"),
        (["--backend", "mpi"], "invalid choice: 'mpi'"),
        (["--master", "node1"], "--master is for srun or torchrun"),
    ],
)
def test_usage(arguments, told, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    try:
        status = main(["doctor", *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"WORLD_SIZE": None}, "RANK is set, but WORLD_SIZE is missing."),
        ({"MASTER_ADDR": "", "MASTER_PORT": None}, "RANK is set, but MASTER_ADDR and MASTER_PORT are missing."),
        ({"RANK": None}, "WORLD_SIZE is set, but RANK is missing."),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK is 'one', which is not a number."),
        ({"MASTER_PORT": "29500.0"}, "MASTER_PORT is '29500.0', which is not a number."),
        ({"RANK": "-1"}, "RANK is '-1', which is not a number."),
        ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2: ranks count from 0."),
    ],
)
def test_a_variable_that_is_missing_or_wrong_is_named(change, told, capsys, monkeypatch):
    given = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    for name, value in {**given, **change}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {told}\nStart the ranks with torchrun or srun") and error.count("\n") == 2


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
            place = {"RANK": number, "WORLD_SIZE": count, "LOCAL_RANK": number}
            try:
                return doctor.run_rank({**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, timeout=timeout)
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
            doctor.facts_of_rank = lambda *args: {**facts(*args), "port": silent.getsockname()[1]}

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
        place = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        assert doctor.run_rank(place, timeout=0.5) == 1
    error = capsys.readouterr().err
    assert f"Nothing answered at 127.0.0.1:{port} within 0.5 s" in error and error.count("\n") == 1


def test_port_that_is_taken(capsys, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        place = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        assert doctor.run_rank(place, timeout=1) == 1
    assert f"Port {port} of 127.0.0.1 cannot be opened" in capsys.readouterr().err


def test_name_without_an_address(capsys):
    place = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": 29500}
    assert doctor.run_rank(place, timeout=1) == 1
    assert "The host name no.such.host.invalid has no address here." in capsys.readouterr().err


# --- under srun -------------------------------------------------------------------------------------------------------


STEP = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}


@pytest.fixture
def step(monkeypatch):
    """Set the environment variables of a task in a Slurm step."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_place_in_a_slurm_step(step):
    place = {"RANK": 9, "WORLD_SIZE": 16, "LOCAL_RANK": 1, "MASTER_ADDR": "gpu07", "MASTER_PORT": 23456}
    assert membership.find_place() == place
    assert membership.find_place("node3") == {**place, "MASTER_ADDR": "node3"}
    assert membership.find_place("node3:29500") == {**place, "MASTER_ADDR": "node3", "MASTER_PORT": 29500}
    with pytest.raises(RuntimeError, match="'node3:ssh' is not HOST or HOST:PORT"):
        membership.find_place("node3:ssh")
    step.setenv("MASTER_PORT", "29501")
    assert membership.find_place()["MASTER_PORT"] == 29501


@pytest.mark.parametrize("change", [{"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_STEP_ID": None}])
def test_a_shell_in_slurm_is_no_rank(change, step):
    for name, value in change.items():
        step.setenv(name, value) if value else step.delenv(name)
    assert membership.find_place() == {}


def test_torchrun_goes_before_slurm(step):
    given = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}
    for name, value in {**given, "MASTER_ADDR": "node1"}.items():
        step.setenv(name, value)
    place = membership.find_place()
    assert (place["RANK"], place["WORLD_SIZE"], place["MASTER_ADDR"]) == (1, 2, "node1")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-05,9]", "gpu03"),
        ("gpu[7]", "gpu7"),
        ("rack2-gpu[001,004-9]-ib,other", "rack2-gpu001-ib"),
    ],
)
def test_first_host_of_a_node_list(nodes, first):
    assert membership.first_host(nodes) == first


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


# --- what findings mean -----------------------------------------------------------------------------------------------


def findings(count=4, hosts=1, gpus=False, **changes):
    """The findings of healthy ranks, with ``changes``: of its entries, or of one rank's facts, as in rank2={...}."""
    local = count // hosts
    infos = {
        rank: {
            "host": f"node{rank // local}",
            "local_rank": rank % local,
            "device": f"cuda:{rank % local}" if gpus else "cpu",
            "model": "H100 80GB HBM3" if gpus else "",
            "gpu_id": f"GPU {rank}" if gpus else "",
            "interface": "eth0",
            "address": f"10.0.0.{rank // local}",
            "python": "3.12.1",
            "torch": "2.13.0",
            "NCCL": "2.28.3" if gpus else "",
            "memory": 64e9,
            "device_memory": 84e9,
        }
        for rank in range(count)
    }
    pairs = [(a, b) for b in range(count) for a in range(b)]
    found = {
        "world_size": count,
        "timeout": 60.0,
        "master": ("node0", 29500),
        "backend": "nccl" if gpus else "gloo",
        "device": "cuda" if gpus else "cpu",
        "infos": infos,
        "members": list(infos),
        "lost": {},
        "errors": {},
        "unreached": {rank: {} for rank in infos},
        "collectives": {name: {rank: [True, 1e-4, 2e9] for rank in infos} for name in COLLECTIVES},
        "links": {pair: [True, 1e-4, 1e9] for pair in pairs},
        "alone": {rank: 0.01 for rank in infos},
        "skews": {rank: 0.0 for rank in infos},
        "plan": None,
        "measured": {},
    }
    for name, change in changes.items():
        if name.startswith("rank"):
            infos[int(name[4:])] |= change
        else:
            found[name] = change
    return found


def test_busbw_is_that_of_nccl_tests():
    text, status = report(findings(4))
    assert status == 0
    rows = {
        line.split()[0]: float(line.split()[-1]) for line in text.splitlines() if line.split()[:1] and " yes " in line
    }
    ring = dict.fromkeys(["scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"], 1.5)
    assert rows == {"broadcast": 2, "reduce": 2, "all_reduce": 3, **ring}  # algbw 2; 2 (n-1)/n, (n-1)/n or 1 of it


@pytest.mark.parametrize("count, hosts", [(1, 1), (2, 2), (8, 1), (16, 2), (256, 32)])
@pytest.mark.parametrize("gpus", [False, True])
def test_reports_fit_a_screen(count, hosts, gpus):
    text, status = report(findings(count, hosts, gpus))
    lines = text.splitlines()
    assert status == 0 and max(map(len, lines)) <= 80 and len(lines) < 40 + hosts
    first, last = count // hosts * (hosts - 1), count - 1
    assert f"{span(range(first, last + 1))} " in text and f"node{hosts - 1} " in text


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lost": {2: "roll call", 3: "roll call"}}, "Ranks 2-3 of 4 did not come within 60 s."),
        ({"lost": {2: "all_reduce"}}, "Rank 2 on node1 stopped answering in the step: all_reduce."),
        ({"rank3": {"python": "3.11.9"}}, "The ranks differ in python: 3.12.1 on ranks 0-2; 3.11.9 on rank 3."),
        ({"rank3": {"NCCL": "2.27.1"}}, "differ in NCCL: none on ranks 0-2; 2.27.1 on rank 3."),
        ({"rank1": {"local_rank": 0}}, "Ranks on node0 have equal local ranks (0, 0)."),
        ({"rank1": {"interface": "ib7", "address": None}}, "Rank 1 should use the network interface ib7, which has no"),
        ({"rank2": {"address": "127.0.1.1"}}, "Rank 2 would listen on 127.0.1.1, which no other host can reach."),
        (
            {"unreached": {0: {2: "timed out", 3: "timed out"}, 1: {2: "timed out", 3: "timed out"}, 2: {}, 3: {}}},
            "Ranks 0-1 cannot connect to ranks 2-3 on node1 (eth0): timed out.",
        ),
        (
            {"skews": {0: 0.0, 1: 0.0, 2: -7.3, 3: 0.0}},
            "The clock of rank 2 on node1 is 7.3 s behind the first rank's.",
        ),
        ({"errors": {"gather": {1: "odd", 2: "odd", 3: "late"}}}, "gather failed on ranks 1-2: odd; on rank 3: late."),
    ],
)
def test_a_problem_in_plain_words(changes, told):
    """With two ranks on each of two hosts, each change makes one problem, which has a remedy."""
    found = findings(4, 2, **changes)
    assert len(list(problems(found))) == 1
    text, status = report(found)
    assert status == 1 and told in flat(text) and text.count("\n  try: ") == 1 and text.endswith("\n1 problem found")
    assert max(map(len, text.splitlines())) <= 80


def test_problems_of_gpus():
    shared = findings(4, gpus=True, rank1={"gpu_id": "GPU 0"})
    assert [what for what, _ in problems(shared)] == ["ranks 0-1 share one GPU, so everything was tried on gloo."]
    without = findings(4, gpus=True, rank3={"gpu_id": ""})
    assert [what for what, _ in problems(without)] == ["rank 3 on node0 found no GPU, and others have one."]


def test_little_shared_memory_is_a_problem_for_nccl_alone():
    little = {"rank0": {"memory": 64e6}}
    (what, remedy), *more = problems(findings(2, 2, gpus=True, **little))
    assert "node0 has only 64 MB of shared memory" in what and "--shm-size" in remedy and not more
    assert not list(problems(findings(2, 2, **little))) and len(list(notes(findings(2, 2, **little)))) == 1


def test_the_slowest_are_named():
    slow = findings(4, 2)
    slow["alone"][2], slow["links"][1, 3] = 0.03, [True, 1e-4, 1e8]
    text, status = report(slow)
    assert status == 0
    assert "rank 2 computes in 3.00 times the median" in text and "ranks 1 and 3: 0.1 GB/s, the median pair 1" in text
    assert "Rank 2 on node1 computes far more slowly" in flat(text) and "link of ranks 1 and 3 has far less" in flat(
        text
    )


@pytest.mark.parametrize("count", range(1, 10))
def test_every_pair_meets_once(count):
    rounds = list(trials.rounds_of_pairs(count))
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) == (count + count % 2 - 1 if count > 1 else 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:63", None),
        (
            "[enforce fail at /build/gloo/common/linux.cc:42] . Unable to find address for: x0",
            ". Unable to find address for: x0",
        ),
        ("../csrc/distributed/c10d/ProcessGroupNCCL.cpp:3356, unhandled system error", None),
        ("", "RuntimeError"),
    ],
)
def test_errors_lose_their_paths(text, told):
    plain = membership.plain(RuntimeError(text))
    assert "/" not in plain and (told is None or plain == told) and plain


def test_an_interface_that_is_not_there(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere9,eth0")
    assert this_rank.choose_interface(torch.device("cpu"), "127.0.0.1") == ("nowhere9", None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", LOOPBACK)
    assert this_rank.choose_interface(torch.device("cpu"), "127.0.0.1") == (LOOPBACK, "127.0.0.1")


def test_a_cluster_needs_torch_and_psutil_alone():
    more = "{'cloudpickle', 'matplotlib', 'nbformat'}"
    source = f"import sys, helpers.__main__, helpers.doctor.examine; print({more} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


# --- a plan -----------------------------------------------------------------------------------------------------------

# What `python -m helpers plan … --json` writes, as far as the doctor reads it.
PLAN = {
    "model": {"name": "tiny"},
    "cluster": {"gpu": "h100", "nodes": 2, "peak": 989e12, "link_in_node": 450e9, "link_between": 50e9},
    "layout": {"dp": 2, "tp": 2, "pp": 1, "cp": 1},
    "memory": {"limit": 80e9},
}
SPEEDS = {"matmul": 700e12, "in_node": 350e9, "between": 40e9}


@pytest.fixture
def written(tmp_path):
    """A call that writes a plan, with changes of its tables, or a text; the file's path."""

    def write(text=None, **changes):
        tables = {name: {**table, **changes.get(name, {})} for name, table in PLAN.items()}
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(tables) if text is None else text)
        return path

    return write


def compare(plan, **changes):
    """The report of four GPUs on two hosts, compared with a plan."""
    measured = {rank: SPEEDS for rank in range(4)}
    return report(findings(4, 2, gpus=True, plan=plan, **{"measured": measured, **changes}))


def test_a_cluster_that_has_what_a_plan_counts_on(written):
    text, status = compare(read_plan(written()))
    assert status == 0 and text.endswith("Nothing is wrong here.") and max(map(len, text.splitlines())) <= 80
    assert text.partition("\nthe plan of tiny on 4 x h100\n")[2].splitlines()[:7] == [
        "ranks     has 4, the plan counts on 4",
        "nodes     has 2, the plan counts on 2",
        "GPUs      has 4 (H100 80GB HBM3), the plan counts on 4",
        "memory    has 84 GB on rank 0, the plan counts on 80",
        "matmul    has 700 TFLOP/s in bfloat16 on rank 0, the plan counts on 989",
        "in a node has 350 GB/s on rank 0, the plan counts on 450",
        "between   has 40 GB/s on rank 0, the plan counts on 50",
    ]


@pytest.mark.parametrize(
    ("of_plan", "of_world", "told"),
    [
        ({"layout": {"dp": 8}}, {}, "The plan counts on 16 ranks, and here are 4."),
        ({"layout": {"dp": 8}}, {}, "The plan counts on 16 GPUs, and here are 4."),
        ({"cluster": {"nodes": 1}}, {}, "The plan counts on 1 nodes, and here are 2."),
        (
            {},
            {"rank3": {"device_memory": 40e9}},
            "The plan counts on 80 GB memory, and rank 3 has less of it. try: Look at that rank's host; "
            "or plan again with [cluster] memory = 4e+10",
        ),
        (
            {},
            {"matmul": 400e12},
            "The plan counts on 989 TFLOP/s in bfloat16 matmul, and rank 2 has less than 50% of it. try: Look at that "
            "rank's host; or plan again with [cluster] peaks = {bfloat16 = 4e+14}",
        ),
        ({}, {"in_node": 12e9}, "The plan counts on 450 GB/s in a node, and rank 2 has less than 50% of it."),
        ({}, {"between": 2e9}, "plan again with [cluster] link_between = 2e+09"),
    ],
)
def test_what_a_plan_counts_on_and_is_not_there(of_plan, of_world, told, written):
    speeds = {name: of_world.pop(name) for name in [*of_world] if name in SPEEDS}
    measured = {rank: {**SPEEDS, **speeds} if rank == 2 else SPEEDS for rank in range(4)}
    text, status = compare(read_plan(written(**of_plan)), measured=measured, **of_world)
    assert status == 1 and told in flat(text) and max(map(len, text.splitlines())) <= 80


def test_what_is_not_known_is_no_problem(written):
    plan = read_plan(written(cluster={"link_in_node": 0}, layout={"dtype": "float8"}))
    measured = {rank: {**SPEEDS, "matmul": None} for rank in range(4)} | {3: None}
    text, status = compare(plan, measured=measured)
    assert status == 0 and "matmul    was not tried, the plan counts on 989" in text
    assert "in a node has 350 GB/s on rank 0, the plan does not say" in text


def test_ranks_on_cpus_share_the_memory_of_their_host(written):
    plan = read_plan(written(cluster={"gpu": "cpu"}))
    text, status = report(findings(4, 2, plan=plan, measured={rank: SPEEDS for rank in range(4)}))
    assert status == 1 and "memory    has 42 GB on rank 0, the plan counts on 80" in text and "GPUs" not in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "The plan {}: No such file or directory."),
        ("", "The plan {} is not JSON, or a part of it: Expecting value: line 1 column 1"),
        (json.dumps(PLAN)[:100], "The plan {} is not JSON, or a part of it: "),
        ("[1, 2]", "{} is JSON, but not a plan's."),
        (json.dumps({**PLAN, "layout": {"dp": "two"}}), "{} is JSON, but not a plan's."),
        (json.dumps({"tried": 12, "ranked": []}), "{} has no 'cluster', so it is not a plan."),
        (json.dumps({**PLAN, "memory": {}}), "{} has no 'limit', so it is not a plan."),
    ],
)
def test_a_file_that_is_not_a_plan(text, told, written, tmp_path, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    path = written(text) if text is not None else tmp_path / "plan.json"
    assert main(["doctor", "--plan", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {told.format(path)}") and error.count("\n") == 2
    assert "Write a plan with: python -m helpers plan MODEL CLUSTER" in error


@pytest.mark.ranks
def test_a_plan_for_this_machine(surroundings, written):
    cluster = {"gpu": "cpu", "nodes": 1, "peak": 1e6, "link_in_node": 1e3}
    plan = written(cluster=cluster, memory={"limit": 1e6}, layout={"dp": 2, "tp": 1, "dtype": "float32"})
    done = run(surroundings, "helpers", "doctor", "--plan", str(plan))
    assert (done.returncode, done.stderr) == (0, "")
    check_report(done.stdout, 2)
    for label, unit in (("memory", "GB"), ("matmul", "TFLOP/s in float32"), ("in a node", "GB/s")):
        row = rf"^{label} +has (\S+) {unit} on rank [01], the plan counts on (\S+)$"
        has, wanted = map(float, re.search(row, done.stdout, re.MULTILINE).groups())
        assert has > 10 * wanted > 0
    assert "ranks     has 2, the plan counts on 2\n" in done.stdout


@pytest.mark.ranks
def test_what_two_hosts_have_between_them(world, written):
    plan = read_plan(written(cluster={"gpu": "cpu", "nodes": 2, "peak": 1e6, "link_in_node": 1e3, "link_between": 1e3}))
    plan |= {"dtype": "float32", "memory": 1e6}

    def prepare(rank):
        doctor.socket.gethostname = lambda: f"node{rank // 2}"  # two ranks each
        run_rank = doctor.run_rank
        doctor.run_rank = lambda *args, **options: run_rank(*args, **options, plan=plan)

    statuses, out = world(4, prepare)
    assert re.search(r"^nodes +has 2, the plan counts on 2$", out, re.MULTILINE)
    for label in ("in a node", "between  "):
        assert re.search(rf"^{label} has \S+ GB/s on rank \d, the plan counts on 1e-06$", out, re.MULTILINE), out


def test_a_plan_of_the_planner_is_read(written):
    path = written(json.dumps(tables(planned("llama3-8b", "h100", {"dp": 8, "tp": 2, "zero": 3, "batch": 64}))))
    plan = read_plan(path)
    assert (plan["ranks"], plan["nodes"], plan["memory"], plan["matmul"]) == (16, 2, 80e9, 989e12)
    assert plan["in_node"] > plan["between"] > 0
