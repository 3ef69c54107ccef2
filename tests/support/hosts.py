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
SPACES = ["--net", "--uts", "--mount", "--pid"]


class Host:
    """Namespaces for the network, the host name, mounts and processes. They exist while their first process runs.

    ``addresses`` is {name: address} of what the host can look up; the file for it goes to the folder.
    """

    def __init__(self, name, folder, addresses):
        self.name, self.network = name, None
        names = Path(folder, f"{name}.hosts")
        names.write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))
        setup = 'hostname "$0"; mount --bind "$1" /etc/hosts; ip link set lo up; echo ready; exec cat'
        command = ["unshare", *SPACES, "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
        command += ["sh", "-c", setup, name, names]
        # `cat` ends when its standard input does, so with this process. Then the kernel ends everything on the host.
        self.holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self.holder.stdout.readline() != b"ready\n":
            self.end()
            raise RuntimeError(f"{' '.join(map(str, command))} did not start a host.")
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text().split()
        self.pid = int(children[0])
        self.network = open(f"/proc/{self.pid}/ns/net")  # while it is open, the cable's other end stays

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
        return ["nsenter", f"--target={self.pid}", *SPACES, f"--wd={cwd or os.getcwd()}", "--", *map(str, command)]

    def start(self, command, cwd=None, **options):
        """Start a command on this host; return its Popen."""
        return subprocess.Popen(self.enter(command, cwd), **options)

    def run(self, *command, cwd=None, check=True, timeout=60, **options):
        """Run a command on this host; return what it prints. Fails with its status and output."""
        line = self.enter(command, cwd)
        process = subprocess.run(line, capture_output=True, text=True, timeout=timeout, **options)
        if check and process.returncode:
            output = f"{process.stdout}{process.stderr}"
            raise AssertionError(f"{' '.join(map(str, command))}: status {process.returncode}\n{output}")
        return process.stdout

    def cut(self):
        """Pull the cable."""
        self.ip("link", "set", INTERFACE, "down")

    def end(self):
        """Remove this host and all that runs on it."""
        self.holder.kill()
        self.holder.wait()
        for file in (self.network, self.holder.stdin, self.holder.stdout):
            if file:
                file.close()


def missing(*programs):
    """The reason why this machine cannot have two hosts on which these programs run, or None."""
    absent = [program for program in ("unshare", "nsenter", "ip", "mount", *programs) if not shutil.which(program)]
    if absent:
        return f"no {', '.join(absent)} on this machine"
    if subprocess.run(["unshare", *SPACES, "--fork", "true"], capture_output=True).returncode:
        return "making network namespaces needs root"
    return None


@contextlib.contextmanager
def two_hosts(*names):
    """A context with (node0, node1), two hosts that a cable joins. ``names``: more {name: address}, for each."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder, contextlib.ExitStack() as stack:
        hosts = []
        for name, more in zip(ADDRESSES, names or ({}, {}), strict=True):
            hosts.append(Host(name, folder, {"localhost": "127.0.0.1", **ADDRESSES, **more}))
            stack.callback(hosts[-1].end)
        hosts[1].connect(ADDRESSES["node1"], hosts[0])
        hosts[0].switch_on(ADDRESSES["node0"])
        yield tuple(hosts)
