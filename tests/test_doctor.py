"""``python -m helpers doctor`` on real ranks: as a command, and on ranks of which something is broken."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import cloudpickle
import leftovers
import pytest
import torch
import torch.distributed as dist
from forked import AT_ADDRESS, TORCHRUN
from slurm_cluster import STEP

from helpers.doctor import examine, membership
from helpers.doctor.membership import LaunchedRank
from helpers.doctor.plan import Need, Plan
from helpers.doctor.trials import COLLECTIVES
from helpers.ranks.launch import RankError, launch, warm

ROOT = Path(__file__).parents[1]
LOOPBACK = "lo"  # the name of the network interface on Linux
if sys.platform == "darwin":
    LOOPBACK = "lo0"
NO_INTERFACE = "nowhere9"
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # A rank would need a second to import this file.


def check_healthy_report(out, ranks):
    """Check what every report about healthy ranks of this machine has. ``out`` is what the doctor printed."""
    report, _, _ = out.partition("\n\nThat was this machine alone.")
    lines = report.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert lines[0] == f"{ranks} ranks on 1 host, gloo"
    assert lines[-1] == "Nothing is wrong here."
    assert f"{LOOPBACK} 127.0.0.1" in out
    assert f"torch {torch.__version__}" in out
    assert f"reached by {ranks} of {ranks}\n" in out
    pairs = ranks * (ranks - 1) // 2
    assert f"{pairs} of {pairs} pairs right" in out
    for name in COLLECTIVES:
        right_row = rf"(?m)^{name} +yes +\d+ +[\d.]+$"  # "all_reduce    yes    310    0.52"
        assert re.search(right_row, out), name


# --- as a command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def environment():
    """Environment variables without a launcher's. Afterwards, the processes that the test started must be gone."""
    with leftovers.surroundings() as environment:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
            environment.pop(name, None)
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        yield environment


def run(environment, *words):
    """Run ``python`` with these words behind it, and return the finished process."""
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.mark.ranks
def test_without_a_launcher_it_starts_two_ranks_here_and_compares_them_with_a_plan(environment, tmp_path):
    tables = {
        "model": {"name": "tiny"},
        "cluster": {"gpu": "cpu", "gpus": 2, "nodes": 1, "peak": 1e6, "link_in_node": 1e3},
        "layout": {"dp": 2, "dtype": "float32"},
        "memory": {"limit": 1e6},
    }
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(tables))
    done = run(environment, "-m", "helpers", "doctor", "--plan", plan)
    assert (done.returncode, done.stderr) == (0, "")
    check_healthy_report(done.stdout, ranks=2)
    comparison = r"(?m)^(.{10})has .*, the plan counts on \S+$"  # "nodes     has 1 here, the plan counts on 1"
    compared = [name.rstrip() for name in re.findall(comparison, done.stdout)]
    assert compared == ["ranks", "nodes", "memory", "matmul", "in a node"]


@pytest.mark.ranks
def test_under_torchrun_one_rank_of_a_host_fails_where_a_problem_is_found(environment):
    # Without a network c10d warns that its client's name is not found.
    environment |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": NO_INTERFACE}
    done = run(environment, *TORCHRUN, *AT_ADDRESS, "--nproc-per-node=2", "-m", "helpers", "doctor")
    report = " ".join(done.stdout.split())  # without its line breaks
    assert f"Ranks 0-1 should use the network interface {NO_INTERFACE}, which has no address." in report
    assert re.search(rf"starting a group on gloo failed on ranks 0-1: .*{NO_INTERFACE}", report)
    assert "\nno process group: no collective was tried\n" in done.stdout
    assert done.returncode == 1
    failed_ranks = re.findall(r"(?m)^ +exitcode", done.stderr)  # torchrun prints such a line for each
    assert len(failed_ranks) == 1


@pytest.mark.ranks
def test_under_srun_rank_0_serves_the_store_and_the_other_rank_finds_it(environment):
    with socket.socket() as holder:  # It keeps the port from other programs until rank 0 listens there.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        _, port = holder.getsockname()
        environment |= {
            **STEP,
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": LOOPBACK,
        }
        tasks = []
        for rank in ("0", "1"):
            variables = {**environment, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
            command = [sys.executable, "-m", "helpers", "doctor"]
            tasks.append(subprocess.Popen(command, cwd=ROOT, env=variables, **PIPES))
        report, errors = tasks[0].communicate(timeout=200)
        printed_by_rank_1 = tasks[1].communicate(timeout=200)
    assert [task.returncode for task in tasks] == [0, 0]
    assert errors == ""
    check_healthy_report(report, ranks=2)
    assert printed_by_rank_1 == ("", "")


IMPORT_THE_DOCTOR = """\
import sys
import helpers.__main__
import helpers.doctor.examine

not_needed = {"cloudpickle", "matplotlib", "nbformat"}
print(not_needed & set(sys.modules))
"""


def test_a_cluster_needs_torch_and_psutil_alone():
    """The doctor imports nothing that only the book needs."""
    done = run(None, "-c", IMPORT_THE_DOCTOR)
    assert (done.stdout, done.stderr) == ("set()\n", "")


# --- on ranks of which something is broken ----------------------------------------------------------------------------


@dataclass
class Result:
    """What the ranks returned, and what they printed."""

    statuses: list  # of each rank: the exit status, or "gone" if it died
    out: str

    @property
    def text(self):
        """The output without its line breaks."""
        return " ".join(self.out.split())

    @property
    def problems(self):
        """How many problems the report counts in its last line, such as "2 problems found"."""
        return int(re.search(r"(?m)^(\d+) problems? found$", self.out)[1])

    @property
    def failed_collectives(self):
        """The names of the collectives whose row says NO, as in "scatter       NO"."""
        return re.findall(r"(?m)^(\w+) +NO\b", self.out)


def doctor_on_rank(port, sabotage, timeout, plan):
    """Let ``sabotage(rank)`` break something on this rank, then run the doctor. Returns its exit status, or "gone"."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    count = dist.get_world_size()
    # The doctor makes its own group. So end the one that launch has made, when no rank needs it any more.
    dist.barrier()
    dist.destroy_process_group()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as under torchrun, no rank serves the store
    del os.environ["TORCHELASTIC_RUN_ID"]  # With it, only one rank of the host would return 1 for a problem.
    try:
        sabotage(rank)
        launched = LaunchedRank(rank, count, rank, "127.0.0.1", port)
        return examine.run_rank(launched, timeout=timeout, plan=plan)
    except SystemExit:
        return "gone"


@pytest.fixture
def run_doctor(capsys):
    """A function that runs the doctor on ``count`` ranks of this machine, and returns a Result.

    Each rank first calls ``sabotage(rank)``, which breaks something that the doctor should find.
    """
    warm()  # starts the forkserver now, so that it is not reported as a leftover process below

    def run(count, sabotage, timeout=60, plan=None):
        store = dist.TCPStore("127.0.0.1", 0, world_size=None, is_master=True, wait_for_workers=False)
        with leftovers.unchanged():  # fails if a process or a file is left
            # The timeout of launch is longer, so that the doctor's own timeout expires first.
            statuses = launch(doctor_on_rank, store.port, sabotage, timeout, plan, nproc=count, timeout=timeout + 100)
        rank_prefix = r"(?m)^\[ranks? [^]]*\] ?"  # launch prints "[rank 0] " before each line
        out = re.sub(rank_prefix, "", capsys.readouterr().out)
        return Result(statuses, out)

    return run


def raises(error):
    """A function that raises this error, whatever its arguments are."""

    def broken(*args, **options):
        raise error

    return broken


@pytest.mark.ranks
def test_ranks_that_come_too_late_or_die_are_named_and_the_others_go_on(run_doctor):
    timeout = 6

    def sabotage(rank):
        if rank == 0:
            time.sleep(2 * timeout)
        if rank == 1:
            dist.all_reduce = raises(SystemExit())  # The rank dies in this collective.

    result = run_doctor(4, sabotage, timeout)
    assert result.statuses == [1, "gone", 1, 1]
    assert "Rank 0 of 4 did not come within 6 s." in result.text
    assert "The others went on without this rank: it was too slow." in result.text
    assert "reached by 3 of 4" in result.text
    assert re.search(r"Rank 1 on \S+ stopped answering in the step: all_reduce\.", result.text)
    assert result.failed_collectives == ["all_reduce"]
    assert "1 of 1 pairs right" in result.text
    assert result.problems == 2


@pytest.mark.ranks
def test_where_a_rank_takes_no_connection_no_group_is_started(run_doctor):
    def sabotage(rank):
        if rank != 1:
            return
        silent = socket.socket()  # It has a port, and does not listen there.
        silent.bind(("127.0.0.1", 0))
        _, silent_port = silent.getsockname()
        original = examine.facts_of_rank

        def facts_with_silent_port(*args):
            return replace(original(*args), port=silent_port)

        examine.facts_of_rank = facts_with_silent_port

    result = run_doctor(2, sabotage)
    assert result.statuses == [1, 1]
    assert "1 of 2 connections between ranks open" in result.text
    assert re.search(r"Rank 0 cannot connect to rank 1 on \S+ \(\S+\): Connection refused\.", result.text)
    assert "no process group: no collective was tried" in result.text
    assert result.problems == 1


@pytest.mark.ranks
def test_what_raises_or_is_wrong_is_named_with_its_ranks_and_what_a_plan_counts_on_is_compared(run_doctor):
    def sabotage(rank):
        original_all_reduce = dist.all_reduce
        original_exchange = dist.batch_isend_irecv

        def wrong_all_reduce(tensor, *args, **options):
            """Change a number of the result."""
            work = original_all_reduce(tensor, *args, **options)
            work.wait()
            tensor[len(tensor) // 2] += 1
            return work

        def broken_exchange(operations):
            """Raise an error between ranks 0 and 1, and change a number that rank 2 receives from rank 3."""
            send, receive = operations
            if {rank, send.peer} == {0, 1}:
                raise RuntimeError("cable cut")
            for work in original_exchange(operations):
                work.wait()
            if (rank, send.peer) == (2, 3):
                receive.tensor[-1] += 1
            return []

        def name_of_host():
            """There are two hosts with two ranks each."""
            return f"node{rank // 2}"

        examine.socket.gethostname = name_of_host
        dist.scatter = raises(RuntimeError("[/build/gloo/pair.cc:42] out of order\nand more"))
        if rank == 1:
            dist.gather = dist.scatter
        if rank == 2:
            dist.all_reduce = wrong_all_reduce
        dist.batch_isend_irecv = broken_exchange

    needs = (Need("nodes", 2), Need("in a node", 1e3), Need("between", 1e3))
    plan = Plan("tiny on 4 x cpu", "float32", needs)
    result = run_doctor(4, sabotage, timeout=8, plan=plan)
    assert result.statuses == [1, 1, 1, 1]
    assert "scatter failed on ranks 0-3: out of order." in result.text
    assert re.search(r"gather failed on .*rank 1: out of order", result.text)
    assert "all_reduce gave a wrong result on rank 2." in result.text
    assert result.failed_collectives == ["scatter", "gather", "all_reduce"]

    assert "4 of 6 pairs right" in result.text
    assert "failed on rank 0: with rank 1: cable cut; on rank 1: with rank 0: cable cut." in result.text
    assert "rank 0 - none" in result.text
    assert "Data between ranks 2 and 3 arrives changed" in result.text

    assert "Ranks 0-3 would listen on 127.0.0.1, which no other host can reach." in result.text
    assert result.problems == 6
    assert "nodes has 2 here, the plan counts on 2" in result.text
    assert re.search(r"in a node has \d+ on rank \d, the plan counts on 1000", result.text)
    assert re.search(r"between has \d+ on rank \d, the plan counts on 1000", result.text)


@pytest.mark.ranks
def test_a_rank_that_hangs_where_no_timeout_reaches_says_where_and_ends(capsys):
    def hang():
        time.sleep(100)

    def attempt_what_hangs():
        membership.REPORT_SECONDS = 0  # so that the rank is ended soon
        member = membership.Membership(store=None, rank=0, world_size=2, timeout=0.05)
        member.attempt("hang", hang)

    with pytest.raises(RankError, match="exit code 1"):
        launch(attempt_what_hangs, nproc=1)
    printed = capsys.readouterr().out
    assert re.search(r"Timeout.*\n(.*\n)*.* in hang\b", printed)  # faulthandler's traceback


@pytest.mark.parametrize(
    ("rank", "host", "message"),
    [
        (1, "127.0.0.1", "Nothing answered at 127.0.0.1:{} within 0.5 s: rank 0 did not start there"),
        (0, "127.0.0.1", "Port {} of 127.0.0.1 cannot be opened: "),
        (1, "no.such.host.invalid", "The host name no.such.host.invalid has no address here."),
    ],
)
def test_a_store_that_cannot_be_reached_or_served_is_one_line(rank, host, message, capsys):
    """Rank 0 would serve the store, and rank 1 would connect to it. {} stands for the port, which is in use."""
    with socket.socket() as silent, mock.patch.dict(os.environ):  # run_rank sets variables, which are taken back.
        silent.bind(("127.0.0.1", 0))  # It has the port, and does not listen there.
        _, port = silent.getsockname()
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        launched = LaunchedRank(rank, world_size=2, local_rank=rank, host=host, port=port)
        status = examine.run_rank(launched, timeout=0.5)
    assert status == 1
    error = capsys.readouterr().err
    assert f": {message.format(port)}" in error
    assert error.count("\n") == 1
