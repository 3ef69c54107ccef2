"""Two hosts on one Linux machine: network namespaces with names, addresses and processes of their own.

A cable joins them. A host ends with the block or with this process, and everything that runs on it ends with the host.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

ADDRESSES = {"node0": "10.88.0.1", "node1": "10.88.0.2"}
INTERFACE = "net0"
NAMESPACES = ["--net", "--uts", "--mount", "--pid"]
# What a host's first process executes, with the host's name ($0) and the file for its names ($1). At last it becomes
# `cat`, which ends when its standard input does, so with the process that has started it.
SET_UP = 'hostname "$0"; mount --bind "$1" /etc/hosts; ip link set lo up; echo ready; exec cat'


class Host:
    """A host: namespaces for the network, the host name, mounts and processes, which exist while a first process runs.

    ``addresses`` are what the host can look up, as {name: address}. They are written to a file in ``folder``.
    """

    def __init__(self, name, folder, addresses):
        self.name = name
        self.network = None  # the open file of the network's namespace
        lines = [f"{address} {name}\n" for name, address in addresses.items()]
        etc_hosts = Path(folder, f"{name}.hosts")
        etc_hosts.write_text("".join(lines))

        command = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
        command += ["sh", "-c", SET_UP, name, str(etc_hosts)]
        self.holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self.holder.stdout.readline() != b"ready\n":
            self.end()
            raise RuntimeError(f"{' '.join(command)} did not start a host.")

        # The first process of the namespaces is the only child of `unshare`. When it ends, so does all on the host.
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text()
        self.pid = int(children.split()[0])
        self.network = open(f"/proc/{self.pid}/ns/net")  # While it is open, the cable's other end stays.

    def ip(self, *words):
        """Run ``ip`` in this host's network, but with the process numbers of this machine."""
        subprocess.run(["nsenter", f"--target={self.pid}", "--net", "--", "ip", *words], check=True, timeout=60)

    def connect(self, address, other, interface_there=INTERFACE):
        """Lay a cable to another host, and give this host its address. ``interface_there`` is the other end's name."""
        other.ip("link", "add", interface_there, "type", "veth", "peer", "name", INTERFACE, "netns", str(self.pid))
        self.switch_on(address)

    def switch_on(self, address, interface=INTERFACE):
        """Give one of this host's interfaces its address, and switch it on."""
        self.ip("addr", "add", f"{address}/24", "dev", interface)
        self.ip("link", "set", interface, "up")

    def enter(self, command, cwd=None):
        """The command line that runs a command on this host, in this process's folder or another one."""
        if cwd is None:
            cwd = os.getcwd()
        return ["nsenter", f"--target={self.pid}", *NAMESPACES, f"--wd={cwd}", "--", *map(str, command)]

    def start(self, command, cwd=None, **options):
        """Start a command on this host. Returns its Popen, for which the options are."""
        return subprocess.Popen(self.enter(command, cwd), **options)

    def run(self, *command, cwd=None, check=True, timeout=60, **options):
        """Run a command on this host. Returns what it prints to stdout.

        Raises AssertionError with its output if its status is not 0, unless ``check`` is false.
        """
        command_here = self.enter(command, cwd)
        process = subprocess.run(command_here, capture_output=True, text=True, timeout=timeout, **options)
        if check and process.returncode != 0:
            words = " ".join(map(str, command))
            raise AssertionError(f"{words}: status {process.returncode}\n{process.stdout}{process.stderr}")
        return process.stdout

    def cut(self):
        """Pull the cable."""
        self.ip("link", "set", INTERFACE, "down")

    def end(self):
        """Remove this host and all that runs on it."""
        self.holder.kill()
        self.holder.wait()
        self.holder.stdin.close()
        self.holder.stdout.close()
        if self.network is not None:
            self.network.close()


def missing(*programs):
    """The reason why this machine cannot have two hosts on which these programs run, or None."""
    needed = ("unshare", "nsenter", "ip", "mount", *programs)
    absent = [program for program in needed if shutil.which(program) is None]
    if absent:
        return f"no {', '.join(absent)} on this machine"
    if subprocess.run(["unshare", *NAMESPACES, "--fork", "true"], capture_output=True).returncode != 0:
        return "making network namespaces needs root"
    return None


@contextlib.contextmanager
def two_hosts(names_on_node0=None, names_on_node1=None):
    """A context with (node0, node1), two hosts that a cable joins.

    Each can look up both hosts' names. ``names_on_node0`` are what node0 looks up beside or in place of them, as
    {name: address}.
    """
    names = {"localhost": "127.0.0.1", **ADDRESSES}
    if names_on_node0 is None:
        names_on_node0 = {}
    if names_on_node1 is None:
        names_on_node1 = {}
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder, contextlib.ExitStack() as stack:
        node0 = Host("node0", folder, {**names, **names_on_node0})
        stack.callback(node0.end)
        node1 = Host("node1", folder, {**names, **names_on_node1})
        stack.callback(node1.end)
        node1.connect(ADDRESSES["node1"], node0)
        node0.switch_on(ADDRESSES["node0"])
        yield node0, node1
