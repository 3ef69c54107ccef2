"""A real Slurm on one Linux machine: a controller and nodes, which are namespaces and have files in place of GPUs.

    with slurm() as cluster:
        job = cluster.submit("job.sbatch", cwd=folder)
        cluster.wait(job)

Every daemon and every job's process runs on one of the hosts of hosts.py. So nothing of it is seen outside, and it ends
with the block, or with this process.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hosts

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "munged")
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
    """The controller's host, ``head``, and the nodes' hosts by name, all connected to one switch."""

    def __init__(self, folder, nodes):
        self.folder = folder
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SBATCH_", "PYTEST_", "PYTHONUNBUFFERED", "TORCH", "OMP_", "GLOO_"))
        }
        self.environment["SLURM_CONF"] = str(folder / "slurm.conf")
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.nodes = {f"n{number}": None for number in range(1, nodes + 1)}

    def start(self, stack):
        """Start the hosts and the daemons; the exit stack ends them."""
        # The host of n1 is called compute1. So a node's name in Slurm has no address, as on some clusters.
        addresses = {name: f"10.88.0.{number}" for number, name in enumerate(["head", *self.nodes], 10)}
        host_names = {name: name.replace("n", "compute") if name in self.nodes else name for name in addresses}
        names = [("localhost", "127.0.0.1"), *((host_names[name], address) for name, address in addresses.items())]
        (self.folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in names))
        (self.folder / "slurm.conf").write_text(SETTINGS.format(folder=self.folder, nodes=len(self.nodes)))
        for number in range(8):
            (self.folder / f"gpu{number}").touch()  # stands for /dev/nvidia0, ...
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        machines = {}
        for name in addresses:
            machines[name] = hosts.Host(host_names[name], self.folder / "hosts")
            stack.callback(machines[name].end)
        self.head = machines.pop("head")
        self.nodes = machines
        self.on_switch("ip", "link", "add", "switch", "type", "bridge")
        self.on_switch("ip", "addr", "add", f"{addresses['head']}/24", "dev", "switch")
        self.on_switch("ip", "link", "set", "switch", "up")
        for name, node in self.nodes.items():
            end = ["peer", "name", hosts.INTERFACE, "netns", str(node.pid)]
            self.on_switch("ip", "link", "add", name, "type", "veth", *end)
            self.on_switch("ip", "link", "set", name, "master", "switch", "up")
            node.run("ip", "addr", "add", f"{addresses[name]}/24", "dev", hosts.INTERFACE)
            node.run("ip", "link", "set", hosts.INTERFACE, "up")
        munge = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid"}
        munge |= {"log-file": "munged.log", "seed-file": "munge.seed"}
        self.run("munged", "--force", *(f"--{option}={self.folder / name}" for option, name in munge.items()))
        self.run("slurmctld")
        self.start_time = time.monotonic()
        for name in self.nodes:
            self.boot(name)

    def boot(self, name):
        """Start a node's daemon."""
        (self.folder / "spool" / name).mkdir(parents=True, exist_ok=True)
        self.run("slurmd", "-N", name, on=self.nodes[name])

    def on_switch(self, *command):
        """Run a command in the controller's network, but with the process numbers of this machine."""
        subprocess.run(["nsenter", f"--target={self.head.pid}", "--net", "--", *command], check=True, timeout=60)

    def run(self, *command, on=None, cwd="/", check=True, timeout=60):
        """Run a command on the controller's host, or on ``on``; return its output. Fails with the status and output."""
        enter = (on or self.head).enter(command)
        enter[enter.index("--") - 1] = f"--wd={cwd}"
        process = subprocess.run(enter, env=self.environment, capture_output=True, text=True, timeout=timeout)
        if check and process.returncode:
            raise AssertionError(
                f"{' '.join(map(str, command))}: status {process.returncode}\n{process.stdout}{process.stderr}"
            )
        return process.stdout

    def submit(self, *command, cwd):
        """Run sbatch; return the job's number."""
        return int(self.run("sbatch", "--parsable", *command, cwd=cwd))

    def state(self, job):
        """A job's state, such as RUNNING; None after its end, when Slurm has forgotten it."""
        return self.run("squeue", "--noheader", "--format=%T", f"--job={job}", check=False).strip() or None

    def wait(self, condition, seconds=300):
        """Wait until a condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"Not within {seconds} s.\n{self.run('squeue')}{self.run('sinfo')}")
            time.sleep(0.4)  # each look at the queue starts two processes

    def until_limits_are_checked(self):
        """Seconds until the controller next looks for jobs whose time is up, which it does every 30 s."""
        return 30 - (time.monotonic() - self.start_time) % 30

    def requeue_soon(self, job):
        """Wait until a job is queued again, then let it start soon: by itself, Slurm would wait much longer.

        It cannot start at once: Slurm counts whole seconds since it has withdrawn the last start's credential.
        """
        self.wait(lambda: self.state(job) == "PENDING")
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")


def missing():
    """The reason why this machine cannot have a Slurm, or None."""
    programs = [program for program in PROGRAMS if not shutil.which(program)]
    if programs:
        return f"no {', '.join(programs)} on this machine"
    return hosts.missing()


@contextlib.contextmanager
def slurm(nodes=3):
    """A context with a Cluster whose nodes n1, n2, ... are ready for jobs."""
    with contextlib.ExitStack() as stack:
        # Not in TMPDIR: slurm.conf cannot hold a path with a space.
        cluster = Cluster(Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))), nodes)
        cluster.start(stack)
        cluster.wait(
            lambda: (
                cluster.run("sinfo", "--noheader", "--partition=main", "--format=%T %D").split() == ["idle", str(nodes)]
            )
        )
        yield cluster
