"""Two hosts, which are network namespaces: they meet or fail to meet, and they lose each other."""

import contextlib
import re
import sys
import time
from pathlib import Path

import hosts
import leftovers
import psutil
import pytest
import recorded
from forked import FORKING, TORCHRUN
from scripting import ROOT

from helpers.export import chapters

pytestmark = [pytest.mark.system(missing=hosts.missing), pytest.mark.timeout(600)]
RECORD = "python -m pytest tests/test_two_hosts.py"
RANKS = [["--nproc-per-node=2"], ["--nproc-per-node=1"]]
STATIC = [["--nnodes=2", "--master-addr=node0", f"--node-rank={node}", *RANKS[node]] for node in (0, 1)]
CHECK = f"{chapters.preflight()}.py"
C10D = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job", "--rdzv-endpoint=node0:29500"]

# A rank that all-reduces for ever, and writes down how often. Once all have met, it waits `patience` seconds for peers.
BEATING = """\
import os, sys, time, traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from helpers.runtime.process_group import start_process_group

try:
    start_process_group(timeout=timedelta(seconds=60))
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=float(sys.argv[1])))
    while True:
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        with open("beats" + os.environ["RANK"], "a") as file:
            print(int(total), file=file)
        time.sleep(0.05)
except BaseException:
    traceback.print_exc()
    os._exit(1)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Environment variables for processes of a test, which starts in a folder with the two scripts. All must end."""
    monkeypatch.chdir(tmp_path)
    chapters.export(chapters.preflight(), tmp_path)
    Path("beating.py").write_text(BEATING)
    with leftovers.surroundings() as environment:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "PET_NNODES"):
            environment.pop(name, None)
        environment |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else a restart may read dead ranks' addresses
        yield environment | {"PYTHONPATH": str(ROOT)}


class Job:
    """One torchrun on each host. ``flags`` has a list of flags for each host."""

    def __init__(self, both, flags, program, environment, torchrun=TORCHRUN):
        self.flags, self.program = flags, program
        self.processes = []
        for host, own in zip(both, flags, strict=True):
            with open(f"{host.name}.out", "w") as out, open(f"{host.name}.err", "w") as err:
                command = [sys.executable, *torchrun, *own, *program]
                self.processes.append(host.start(command, env=environment, stdout=out, stderr=err))

    def statuses(self):
        """[exit status] of the agents; None for an agent that runs."""
        return [process.poll() for process in self.processes]

    def ends(self, statuses):
        """Wait for both agents, and compare their exit statuses."""
        leftovers.wait_until(lambda: None not in self.statuses(), 200)
        assert self.statuses() == statuses, self.outputs()

    def out(self, node):
        return Path(f"node{node}.out").read_text()

    def err(self, node):
        return Path(f"node{node}.err").read_text()

    def outputs(self):
        """The output of both hosts, for an assertion's message."""
        return "\n".join(self.out(node) + self.err(node)[-3000:] for node in (0, 1))

    def lines(self):
        """The command lines as a reader would type them."""
        lines = [" ".join([*own, *self.program]) for own in self.flags]
        return "".join(f"node{node}$ torchrun {line}\n" for node, line in enumerate(lines))

    def agent(self, node):
        """The agent's process, which is a child of nsenter's."""
        return psutil.Process(self.processes[node].pid).children()[0]

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
                    for child in psutil.Process(process.pid).children(recursive=True):
                        child.kill()
            process.wait()


def both_flags(common, own):
    """Flags for Job: [both hosts' flags and the host's own] for each host."""
    return [[*common, *flags] for flags in own]


def beats(rank):
    """(how often a rank has all-reduced so far, the last sum, which is the number of ranks)."""
    path = Path(f"beats{rank}")
    counts = path.read_text().splitlines() if path.exists() else []
    return len(counts), int(counts[-1]) if counts else 0


def all_beat(job, ranks=(0, 1, 2), seconds=60):
    """Wait until each rank has all-reduced five more times."""
    ends = {rank: beats(rank)[0] + 5 for rank in ranks}
    assert leftovers.wait_until(lambda: all(beats(rank)[0] >= end for rank, end in ends.items()), seconds), (
        job.outputs()
    )


@pytest.mark.daily
def test_two_kinds_of_rendezvous(place):
    """They run the chapter's own script on 2 + 1 ranks."""
    text = ""
    with hosts.two_hosts() as both:
        for flags, torchrun in ((STATIC, TORCHRUN), (both_flags(C10D, RANKS), FORKING)):
            with contextlib.closing(Job(both, flags, [CHECK, "--size=1048576"], place, torchrun)) as job:
                job.ends([0, 0])
            assert job.out(1) == ""  # rank 0 alone prints
            text += job.lines() + job.out(0) + "\n"
    recorded.compare("two_hosts", text, f"{RECORD} -k rendezvous", varying=[r"(?m)\d+ +\d+\.\d{3}$"])


@pytest.mark.daily
def test_a_name_that_means_the_loopback(place):
    """With Debian's line `127.0.1.1 node0`, no host serves the store; with a flag for that, none reaches rank 0."""
    c10d = [*C10D[:-1], "--rdzv-endpoint=10.88.0.1:29500"]
    serves = [["--rdzv-conf=is_host=true", "--local-addr=10.88.0.1"]]
    serves += [["--rdzv-conf=is_host=false", "--local-addr=10.88.0.2"]]
    one_host_serves = both_flags(c10d, serves)
    with hosts.two_hosts({"node0": "127.0.1.1"}, {"node1": "127.0.1.1"}) as both:
        text = f"node0$ getent hosts node0\n{both[0].run('getent', 'hosts', 'node0')}\n"

        no_host_serves = both_flags([*c10d, "--rdzv-conf=read_timeout=3"], [[], []])
        with contextlib.closing(Job(both, no_host_serves, [CHECK], place)) as job:
            job.ends([1, 1])
        text += job.lines()
        for node in (0, 1):
            errors = re.findall(r"DistNetworkError: (The client socket has timed out.*)", job.err(node))
            assert errors and "RendezvousConnectionError" in job.err(node), job.outputs()
            text += f"node{node}: {errors[0]}\n"

        refusal = re.compile(r"(?m)Gloo connectFullMesh failed with \[\S+\] (.*127\.0\.1\.1\]):\d+(.*?)(?:\$\d)?$")
        with contextlib.closing(Job(both, one_host_serves, [CHECK, "--patience=8"], place)) as job:
            assert leftovers.wait_until(lambda: 1 in job.statuses(), 200), job.outputs()
            # It may come from the other host.
            error = leftovers.wait_until(lambda: refusal.search(job.err(0) + job.err(1)))
            assert error, job.outputs()
        text += f"\n{job.lines()}{error[1]}:PORT{error[2]}\n"

        by_interface = {**place, "GLOO_SOCKET_IFNAME": hosts.INTERFACE}
        with contextlib.closing(Job(both, one_host_serves, [CHECK], by_interface)) as job:
            job.ends([0, 0])
        text += "\n" + re.sub(r"(?m)^(node\d\$) ", rf"\1 GLOO_SOCKET_IFNAME={hosts.INTERFACE} ", job.lines())
        text += job.out(0).splitlines()[-1] + "\n"
    recorded.compare("two_hosts_own_name", text, f"{RECORD} -k loopback")


def test_both_hosts_are_node_0(place):
    """Each gets its port; then both stand in the same wait, until the time of rendezvous is over."""
    flags = both_flags(["--nnodes=2", "--master-addr=node0", "--node-rank=0", "--rdzv-conf=timeout=6"], RANKS)
    with hosts.two_hosts() as both, contextlib.closing(Job(both, flags, [CHECK], place)) as job:
        job.ends([1, 1])
    for node in (0, 1):
        assert "EADDRINUSE" not in job.err(node), job.outputs()
        assert "wait timeout" in job.err(node) and "role_info/1" in job.err(node), job.outputs()


LOSSES = """\
rank 2, on node1, is killed
  node1's agent: its rank ended with -9 (SIGKILL); it ends, status 1
  node0's ranks: Connection closed by peer; its agent ends, status 1

node1's agent is killed
  ranks 0, 1 and 2: train on, rank 2 without an agent
  node0's agent: sees nothing

the link between them is cut
  ranks 0, 1 and 2: stand still, without an error
  after the group's timeout, here 6 s: Timed out; node0's agent ends, status 1
"""


@pytest.mark.daily
def test_a_worker_an_agent_a_link_are_lost(place):
    with hosts.two_hosts() as both:
        with contextlib.closing(Job(both, STATIC, ["beating.py", "60"], place)) as job:
            all_beat(job, seconds=200)  # with the ranks' start
            [worker] = job.agent(1).children()
            assert worker.environ()["RANK"] == "2"
            worker.kill()
            job.ends([1, 1])
        assert re.search(r"exitcode +: -9", job.err(1)) and "SIGKILL" in job.err(1)
        assert re.search(r"Connection (closed|reset) by peer", job.err(0)), job.outputs()

        for rank in range(3):
            Path(f"beats{rank}").unlink()
        with contextlib.closing(Job(both, STATIC, ["beating.py", "6"], place)) as job:
            all_beat(job, seconds=200)
            job.agent(1).kill()
            time.sleep(1)
            all_beat(job)  # all three, although nobody watches rank 2
            assert job.statuses()[0] is None

            cut = time.monotonic()
            both[1].cut()
            time.sleep(1)
            counts = [beats(rank) for rank in range(3)]
            time.sleep(2)
            assert [beats(rank) for rank in range(3)] == counts  # no error, no step
            assert job.statuses()[0] is None
            leftovers.wait_until(lambda: job.statuses()[0] is not None, 40)
            assert job.statuses()[0] == 1 and time.monotonic() - cut > 5, job.outputs()
            assert "imed out" in job.err(0), job.outputs()
    recorded.compare("two_hosts_losses", LOSSES, f"{RECORD} -k lost")


@pytest.mark.daily
def test_elastic_goes_on_with_one_host(place):
    """With --nnodes=1:2, the job goes on when the node that does not serve the store is switched off."""
    fast = "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    flags = both_flags(["--nnodes=1:2", *C10D[1:], fast, "--monitor-interval=0.5", "--max-restarts=3"], RANKS)
    with hosts.two_hosts() as both, contextlib.closing(Job(both, flags, ["beating.py", "3"], place, FORKING)) as job:
        assert leftovers.wait_until(lambda: beats(0)[1] == 3, 200), job.outputs()
        before = beats(0)[0]
        both[1].cut()  # first, so that no word of its end comes out
        both[1].holder.kill()
        assert leftovers.wait_until(lambda: beats(0)[1] == 2, 60), job.outputs()
        all_beat(job, [0, 1])
        assert beats(0)[0] > before and job.statuses()[0] is None


def test_doctor_sees_both_hosts(place):
    program = ["-m", "helpers", "doctor"]
    with hosts.two_hosts() as both, contextlib.closing(Job(both, STATIC, program, place)) as job:
        job.ends([0, 0])
    text = job.lines() + job.out(0)
    assert "3 ranks on 2 hosts" in text and "3 of 3 pairs right" in text
    # A load that meets one rank or one pair makes it slow, and the report has a note on that.
    slow = r"note   (?:Rank \d on node\d computes far|The link of ranks \d and \d has far) "
    text = re.sub(rf"(?m)^{slow}.*\n(?: {{7}}.*\n)*  try: .*\n(?: {{7}}.*\n)*", "", text)
    machine = [r"(?m)^(memory|clocks) .*$", r"(?ms)^(slowest|pairs:) .*?$(?=\n\n)", r"python \S+, torch \S+"]
    numbers = r"(?m) +[\d.,]+(?= |$)"
    recorded.compare("two_hosts_doctor", text, f"{RECORD} -k doctor", varying=[*machine, numbers])
