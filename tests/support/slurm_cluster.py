"""A real Slurm on one Linux machine: a controller and nodes, which are namespaces and have files in place of GPUs.

All its processes run on the hosts of hosts.py, so nothing is seen outside, and all ends with the block or this process.
"""

import contextlib
import functools
import os
import sys
import tempfile
import time
from pathlib import Path

import hosts

missing = functools.partial(hosts.missing, "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "munged")
WAIT_SECONDS = 300
# slurm.conf for the hosts of a Cluster: head, compute1 with the node n1, compute2 with n2, and so on.
SETTINGS = """\
ClusterName=book
SlurmctldHost=head
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
GresTypes=gpu
ReturnToService=2
MailProg=/bin/true
# What a cluster has is in minutes; these are the shortest times that work.
KillWait=2
SlurmdTimeout=4
MessageTimeout=5
TreeWidth=64
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=0
PropagateResourceLimits=NONE
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-{nodes}] NodeHostname=compute[1-{nodes}] NodeAddr=10.88.0.[11-1{nodes}] CPUs=64 RealMemory=64000 Gres=gpu:8
PartitionName=main Nodes=n[1-{nodes}] Default=YES PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=n[1-{nodes}] PriorityTier=10 PreemptMode=OFF
"""

# What Slurm tells one task of a step on two nodes.
STEP = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}


class Cluster:
    """Slurm's controller on the host ``head``, and nodes on hosts of their own. All are connected to one switch.

    The exit stack ends the hosts, and with them Slurm's daemons.
    """

    def __init__(self, folder, nodes, stack):
        self.environment = environment_of_slurm(folder)
        write_files(folder, nodes)

        # The host of n1 is called compute1. So a node's name in Slurm has no address, as on some clusters.
        host_names = ["head"]
        for number in range(1, nodes + 1):
            host_names.append(f"compute{number}")
        addresses = {name: f"10.88.0.{number}" for number, name in enumerate(host_names, 10)}

        self.head = self.start_host("head", addresses, folder, stack)
        self.nodes = {}  # {the node's name in Slurm, such as "n1": its host}
        for number in range(1, nodes + 1):
            self.nodes[f"n{number}"] = self.start_host(f"compute{number}", addresses, folder, stack)
        self.connect_to_switch(addresses)
        self.start_daemons(folder)

    def start_host(self, name, addresses, folder, stack):
        """Start a host that can look up all addresses, but for its own, and let the exit stack end it."""
        known = {"localhost": "127.0.0.1", **addresses}
        if name != "head":
            known[name] = "127.0.1.1"  # As on Debian, a node's own name means the loopback.
        host = hosts.Host(name, folder, known)
        stack.callback(host.end)
        return host

    def connect_to_switch(self, addresses):
        """Make a network of the hosts: a switch on the head, and a cable from it to each node."""
        self.head.ip("link", "add", "switch", "type", "bridge")
        self.head.switch_on(addresses["head"], "switch")
        for name, node in self.nodes.items():
            node.connect(addresses[node.name], self.head, interface_there=name)
            self.head.ip("link", "set", name, "master", "switch", "up")

    def start_daemons(self, folder):
        """Start munged, with which Slurm's daemons know each other, then the controller, then a daemon on each node."""
        self.run(
            "munged",
            "--force",
            f"--socket={folder}/munge.socket",
            f"--key-file={folder}/munge.key",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munge.seed",
        )
        self.run("slurmctld")
        self.start_time = time.monotonic()
        for name, node in self.nodes.items():
            (folder / "spool" / name).mkdir(parents=True)
            node.run("slurmd", "-N", name, cwd="/", env=self.environment)

    def run(self, *command, cwd="/", **options):
        """Run a command on the controller's host; return its output. Fails with the status and output."""
        return self.head.run(*command, cwd=cwd, env=self.environment, **options)

    def submit(self, *command, cwd):
        """Run sbatch; return the job's number."""
        return int(self.run("sbatch", "--parsable", *command, cwd=cwd))

    def wait_for(self, condition, output=None):
        """Wait until ``condition()`` is true.

        If it does not become true in time, the AssertionError shows Slurm's queue and nodes, and a job's output, which
        is in the file ``output``.
        """
        end = time.monotonic() + WAIT_SECONDS
        while not condition():
            if time.monotonic() > end:
                written = ""
                if output is not None and output.exists():
                    written = output.read_text()
                raise AssertionError(f"Not within {WAIT_SECONDS} s.\n{self.run('squeue')}{self.run('sinfo')}{written}")
            time.sleep(0.4)  # not more often, because each look at the queue starts two processes

    def seconds_until_limits_are_checked(self):
        """Seconds until the controller next looks for jobs whose time is up, which it does every 30 s."""
        return 30 - (time.monotonic() - self.start_time) % 30


def environment_of_slurm(folder):
    """Environment variables with which Slurm's programs find this cluster, without those that the tests have set."""
    set_by_tests = ("SLURM_", "SBATCH_", "PYTEST_", "PYTHONUNBUFFERED", "TORCH", "OMP_", "GLOO_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(set_by_tests)}
    environment["SLURM_CONF"] = str(folder / "slurm.conf")
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return environment


def write_files(folder, nodes):
    """Write the cluster's settings, its key, and files that stand for /dev/nvidia0, ..."""
    (folder / "slurm.conf").write_text(SETTINGS.format(folder=folder, nodes=nodes))
    for number in range(8):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)


@contextlib.contextmanager
def slurm(nodes=3):
    """A context with a Cluster whose nodes n1, n2, ... are ready for jobs."""
    # Not in TMPDIR: slurm.conf cannot hold a path with a space.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, contextlib.ExitStack() as stack:
        cluster = Cluster(Path(folder), nodes, stack)

        def all_nodes_are_idle():
            """Whether sinfo prints one line, such as "idle 3", because all nodes are in the same state."""
            states = cluster.run("sinfo", "--noheader", "--partition=main", "--format=%T %D")
            return states.split() == ["idle", str(nodes)]

        cluster.wait_for(all_nodes_are_idle)
        yield cluster
