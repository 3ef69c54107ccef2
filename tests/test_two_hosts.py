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

pytestmark = [pytest.mark.system(missing=hosts.missing), pytest.mark.timeout(900)]

RECORD = "python -m pytest tests/test_two_hosts.py"
CHECK = f"{chapters.preflight()}.py"
TWO_AND_ONE_RANKS = [["--nproc-per-node=2"], ["--nproc-per-node=1"]]
STATIC = [
    ["--nnodes=2", "--master-addr=node0", "--node-rank=0", "--nproc-per-node=2"],
    ["--nnodes=2", "--master-addr=node0", "--node-rank=1", "--nproc-per-node=1"],
]
C10D = ["--rdzv-backend=c10d", "--rdzv-id=job", "--rdzv-endpoint=node0:29500"]
C10D_BY_ADDRESS = ["--rdzv-backend=c10d", "--rdzv-id=job", "--rdzv-endpoint=10.88.0.1:29500"]
START_SECONDS = 400  # for agents and ranks to import torch and to meet, on a machine that is very busy

# A script whose ranks all-reduce for ever. Each appends the sums, which are the number of ranks, to its file "sums0",
# "sums1" and so on. Its argument is the timeout of the all-reduces, in seconds.
ALL_REDUCING = """\
import os, sys, time, traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from helpers.runtime.process_group import start_process_group

try:
    start_process_group(timeout=timedelta(seconds=200))
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=float(sys.argv[1])))
    while True:
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        with open("sums" + os.environ["RANK"], "a") as file:
            print(int(total), file=file)
        time.sleep(0.05)
except BaseException:
    traceback.print_exc()
    os._exit(1)
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Environment variables for the processes of a test, all of which must have ended after it.

    The test runs in a folder with chapter 12's script and all_reducing.py.
    """
    monkeypatch.chdir(tmp_path)
    chapters.export(chapters.preflight(), tmp_path)
    Path("all_reducing.py").write_text(ALL_REDUCING)
    with leftovers.surroundings() as environment:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "PET_NNODES"):
            environment.pop(name, None)
        environment |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # Otherwise a restart may read dead ranks' addresses.
        environment["PYTHONPATH"] = str(ROOT)
        yield environment


class Job:
    """One torchrun on each of two hosts, called the host's agent.

    ``flags`` has a list of torchrun's flags for each host. ``program`` is the script with its flags, for both.
    """

    def __init__(self, both_hosts, flags, program, environment, torchrun=TORCHRUN):
        self.flags = flags
        self.program = program
        self.processes = []
        for host, flags_of_host in zip(both_hosts, flags, strict=True):
            command = [sys.executable, *torchrun, *flags_of_host, *program]
            with open(f"{host.name}.out", "w") as out, open(f"{host.name}.err", "w") as errors:
                process = host.start(command, env=environment, stdout=out, stderr=errors)
            self.processes.append(process)

    def statuses(self):
        """The agents' exit statuses, as a list. An agent that still runs has None."""
        return [process.poll() for process in self.processes]

    def wait_for(self, condition, seconds=START_SECONDS):
        """Wait until ``condition()`` is true, and return its value. Fails with the output of both hosts."""
        value = leftovers.wait_until(condition, seconds)
        assert value, self.outputs()
        return value

    def wait_for_end(self, statuses):
        """Wait until both agents have ended. Fails if their exit statuses are not these."""
        self.wait_for(lambda: None not in self.statuses())
        assert self.statuses() == statuses, self.outputs()

    def wait_for_sums(self, ranks):
        """Wait until each of these ranks has all-reduced five more times."""
        enough = {rank: len(sums(rank)) + 5 for rank in ranks}

        def all_have_enough():
            return all(len(sums(rank)) >= enough[rank] for rank in ranks)

        self.wait_for(all_have_enough)

    def out(self, node):
        """What a host has written to stdout."""
        return Path(f"node{node}.out").read_text()

    def errors(self, node):
        """What a host has written to stderr."""
        return Path(f"node{node}.err").read_text()

    def outputs(self):
        """The output of both hosts, for an assertion's message."""
        return "\n".join(self.out(node) + self.errors(node)[-3000:] for node in (0, 1))

    def command_lines(self):
        """The command lines as a reader would type them."""
        text = ""
        for node, flags in enumerate(self.flags):
            text += f"node{node}$ torchrun {' '.join([*flags, *self.program])}\n"
        return text

    def agent(self, node):
        """The agent's process, which is a child of nsenter's."""
        return psutil.Process(self.processes[node].pid).children()[0]

    def close(self):
        """End what still runs."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):  # It has just ended by itself.
                    for child in psutil.Process(process.pid).children(recursive=True):
                        child.kill()
            process.wait()


@contextlib.contextmanager
def job(*arguments, **options):
    """A context with a Job of these arguments. What still runs at its end is ended."""
    with contextlib.closing(Job(*arguments, **options)) as running:
        yield running


def sums(rank):
    """The sums of a rank's all-reduces so far, as text: ``["3", "3", "3"]`` if three ranks took part in three."""
    path = Path(f"sums{rank}")
    if not path.exists():
        return []
    return path.read_text().split()


def flags_of_both(common, own=((), ())):
    """The flags of both hosts, for Job: for each host, the common ones and its own."""
    return [[*common, *own[0]], [*common, *own[1]]]


# --- hosts that meet --------------------------------------------------------------------------------------------------


@pytest.mark.daily
def test_two_kinds_of_rendezvous(environment):
    """They run the chapter's own script on 2 + 1 ranks."""
    c10d = flags_of_both(["--nnodes=2", *C10D], TWO_AND_ONE_RANKS)
    program = [CHECK, "--size=1048576"]
    text = ""
    with hosts.two_hosts() as both_hosts:
        for flags, torchrun in ((STATIC, TORCHRUN), (c10d, FORKING)):
            with job(both_hosts, flags, program, environment, torchrun) as running:
                running.wait_for_end([0, 0])
            assert running.out(1) == "", "rank 0 alone prints"
            text += running.command_lines() + running.out(0) + "\n"
    recorded.compare("two_hosts", text, f"{RECORD} -k rendezvous", varying=[r"(?m)\d+ +\d+\.\d{3}$"])


def test_doctor_sees_both_hosts(environment):
    with hosts.two_hosts() as both_hosts:
        with job(both_hosts, STATIC, ["-m", "helpers", "doctor"], environment) as running:
            running.wait_for_end([0, 0])
    text = running.command_lines() + running.out(0)
    assert "3 ranks on 2 hosts" in text
    assert "3 of 3 pairs right" in text
    # A load that meets one rank or one pair makes it slow, and the report has a note on that.
    slow = r"note   (?:Rank \d on node\d computes far|The link of ranks \d and \d has far) "
    text = re.sub(rf"(?m)^{slow}.*\n(?: {{7}}.*\n)*  try: .*\n(?: {{7}}.*\n)*", "", text)
    of_this_machine = [
        r"(?m)^(memory|clocks) .*$",
        r"(?ms)^(slowest|pairs:) .*?$(?=\n\n)",
        r"python \S+, torch \S+",
        r"(?m) +[\d.,]+(?= |$)",
    ]
    recorded.compare("two_hosts_doctor", text, f"{RECORD} -k doctor", varying=of_this_machine)


# --- hosts that fail to meet ------------------------------------------------------------------------------------------


@pytest.mark.daily
def test_a_name_that_means_the_loopback(environment):
    """On Debian, a host's own name means an address of its loopback: `127.0.1.1 node0`. The book shows three cases.

    - No host serves the store, because none has the address of the rendezvous for its own.
    - A flag says which host serves it. Then the ranks cannot connect, because rank 0 gives the others its own name.
    - GLOO_SOCKET_IFNAME says by which interface the ranks connect. Then the job runs.
    """
    one_host_serves = flags_of_both(
        ["--nnodes=2", *C10D_BY_ADDRESS],
        [
            ["--rdzv-conf=is_host=true", "--local-addr=10.88.0.1"],
            ["--rdzv-conf=is_host=false", "--local-addr=10.88.0.2"],
        ],
    )
    with hosts.two_hosts({"node0": "127.0.1.1"}, {"node1": "127.0.1.1"}) as both_hosts:
        text = f"node0$ getent hosts node0\n{both_hosts[0].run('getent', 'hosts', 'node0')}\n"

        no_host_serves = flags_of_both(["--nnodes=2", *C10D_BY_ADDRESS, "--rdzv-conf=read_timeout=3"])
        with job(both_hosts, no_host_serves, [CHECK], environment) as running:
            running.wait_for_end([1, 1])
        text += running.command_lines()
        for node in (0, 1):
            assert "RendezvousConnectionError" in running.errors(node), running.outputs()
            error = re.search(r"DistNetworkError: (The client socket has timed out.*)", running.errors(node))
            text += f"node{node}: {error[1]}\n"

        # Gloo's error has the address with a port: "Gloo connectFullMesh failed with [...] ...127.0.1.1]:40123, ...".
        refusal = re.compile(r"(?m)Gloo connectFullMesh failed with \[\S+\] (.*127\.0\.1\.1\]):\d+(.*?)(?:\$\d)?$")
        with job(both_hosts, one_host_serves, [CHECK, "--patience=8"], environment) as running:
            # Either host may be the one that says it.
            error = running.wait_for(lambda: refusal.search(running.errors(0) + running.errors(1)))
        text += f"\n{running.command_lines()}{error[1]}:PORT{error[2]}\n"

        with_interface = {**environment, "GLOO_SOCKET_IFNAME": hosts.INTERFACE}
        with job(both_hosts, one_host_serves, [CHECK], with_interface) as running:
            running.wait_for_end([0, 0])
        lines = running.command_lines()
        text += "\n" + re.sub(r"(?m)^(node\d\$) ", rf"\1 GLOO_SOCKET_IFNAME={hosts.INTERFACE} ", lines)
        text += running.out(0).splitlines()[-1] + "\n"
    recorded.compare("two_hosts_own_name", text, f"{RECORD} -k loopback")


@pytest.mark.daily
def test_both_hosts_are_node_0(environment):
    """Each gets its port, so no error says so. Then both wait for node 1, until the time of the rendezvous is over."""
    common = ["--nnodes=2", "--master-addr=node0", "--node-rank=0", "--rdzv-conf=timeout=6"]
    flags = flags_of_both(common, TWO_AND_ONE_RANKS)
    with hosts.two_hosts() as both_hosts:
        with job(both_hosts, flags, [CHECK], environment) as running:
            running.wait_for_end([1, 1])
    for node in (0, 1):
        assert "EADDRINUSE" not in running.errors(node), running.outputs()
        assert "wait timeout" in running.errors(node), running.outputs()
        assert "role_info/1" in running.errors(node), running.outputs()


# --- hosts that lose each other ---------------------------------------------------------------------------------------

# What the book shows. The test holds it true, sentence by sentence.
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
GROUP_TIMEOUT = 6


@pytest.mark.daily
def test_a_worker_an_agent_a_link_are_lost(environment):
    with hosts.two_hosts() as both_hosts:
        # Rank 2, on node1, is killed.
        with job(both_hosts, STATIC, ["all_reducing.py", "60"], environment) as running:
            running.wait_for_sums([0, 1, 2])
            [worker] = running.agent(1).children()
            assert worker.environ()["RANK"] == "2"
            worker.kill()
            running.wait_for_end([1, 1])
        assert re.search(r"exitcode +: -9", running.errors(1))
        assert "SIGKILL" in running.errors(1)
        assert re.search(r"Connection (closed|reset) by peer", running.errors(0)), running.outputs()

        # The agent of node1 is killed.
        with job(both_hosts, STATIC, ["all_reducing.py", str(GROUP_TIMEOUT)], environment) as running:
            running.wait_for_sums([0, 1, 2])
            running.agent(1).kill()
            running.wait_for(lambda: running.statuses()[1] is not None)
            running.wait_for_sums([0, 1, 2])  # although nobody watches rank 2
            assert running.statuses()[0] is None

            # The link between the hosts is cut, too.
            time_of_cut = time.monotonic()
            both_hosts[1].cut()
            time.sleep(1)  # for what was on the way
            sums_after_cut = [sums(0), sums(1), sums(2)]
            running.wait_for(lambda: running.statuses()[0] is not None)
            assert time.monotonic() - time_of_cut >= GROUP_TIMEOUT - 1
            assert [sums(0), sums(1), sums(2)] == sums_after_cut
            assert running.statuses()[0] == 1
            assert "imed out" in running.errors(0), running.outputs()
    recorded.compare("two_hosts_losses", LOSSES, f"{RECORD} -k lost")


@pytest.mark.daily
def test_elastic_goes_on_with_one_host(environment):
    """With --nnodes=1:2, the job goes on when the node that does not serve the store is switched off."""
    short_times = "--rdzv-conf=last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=5"
    common = ["--nnodes=1:2", *C10D, short_times, "--monitor-interval=0.5", "--max-restarts=3"]
    flags = flags_of_both(common, TWO_AND_ONE_RANKS)
    program = ["all_reducing.py", "10"]
    with hosts.two_hosts() as both_hosts:
        with job(both_hosts, flags, program, environment, FORKING) as running:
            running.wait_for(lambda: sums(0)[-1:] == ["3"])
            both_hosts[1].cut()  # first, so that node 0 does not learn of the end
            both_hosts[1].holder.kill()
            running.wait_for(lambda: sums(0)[-1:] == ["2"])
            running.wait_for_sums([0, 1])
            assert running.statuses()[0] is None
