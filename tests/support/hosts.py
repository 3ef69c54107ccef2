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
SET_UP = 'hostname "$0"; mount --bind "$1" /etc/hosts; ip link set lo up; echo ready; exec cat'


class Host:
    """Namespaces for the network, the host name, mounts and processes. They exist while their first process runs.

    ``addresses`` is {name: address} of what the host can look up; the file for it goes to the folder.
    """

    def __init__(self, name, folder, addresses):
        self.name = name
        self.network = None
        names = Path(folder, f"{name}.hosts")
        names.write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))
        command = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
        command += ["sh", "-c", SET_UP, name, str(names)]
        # `cat` ends when its standard input does, so with this process. Then the kernel ends everything on the host.
        self.holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self.holder.stdout.readline() != b"ready\n":
            self.end()
            raise RuntimeError(f"{' '.join(command)} did not start a host.")
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text()
        self.pid = int(children.split()[0])
        self.network = open(f"/proc/{self.pid}/ns/net")  # While it is open, the cable's other end stays.

    def ip(self, *words):
        """Run ``ip`` in this host's network, but with the process numbers of this machine."""
        subprocess.run(["nsenter", f"--target={self.pid}", "--net", "--", "ip", *words], check=True, timeout=60)

    def connect(self, address, other, plug=INTERFACE):
        """Give this host its address, and lay a cable to another host, on which its end is called ``plug``."""
        other.ip("link", "add", plug, "type", "veth", "peer", "name", INTERFACE, "netns", str(self.pid))
        self.switch_on(address)

    def switch_on(self, address, interface=INTERFACE):
        self.ip("addr", "add", f"{address}/24", "dev", interface)
        self.ip("link", "set", interface, "up")

    def enter(self, command, cwd=None):
        """The command line that runs a command on this host."""
        folder = cwd or os.getcwd()
        return ["nsenter", f"--target={self.pid}", *NAMESPACES, f"--wd={folder}", "--", *map(str, command)]

    def start(self, command, cwd=None, **options):
        """Start a command on this host; return its Popen."""
        return subprocess.Popen(self.enter(command, cwd), **options)

    def run(self, *command, cwd=None, check=True, timeout=60, **options):
        """Run a command on this host; return what it prints. Fails with its status and output."""
        line = self.enter(command, cwd)
        process = subprocess.run(line, capture_output=True, text=True, timeout=timeout, **options)
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
        if self.network:
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
    """A context with (node0, node1), two hosts that a cable joins; each may look up more {name: address}."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder, contextlib.ExitStack() as stack:
        hosts = []
        for name, names in (("node0", names_on_node0), ("node1", names_on_node1)):
            host = Host(name, folder, {"localhost": "127.0.0.1", **ADDRESSES, **(names or {})})
            stack.callback(host.end)
            hosts.append(host)
        node0, node1 = hosts
        node1.connect(ADDRESSES["node1"], node0)
        node0.switch_on(ADDRESSES["node0"])
        yield node0, node1
