"""Two hosts on one Linux machine: network namespaces with names, addresses and processes of their own.

    with two_hosts() as (node0, node1):
        process = node1.start(["ping", "-c1", "node0"])

A cable joins them. A host ends with the block or with this process, and everything that runs on it ends with the host.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("node0", "node1")
ADDRESSES = {"node0": "10.88.0.1", "node1": "10.88.0.2"}
INTERFACE = "net0"


class Host:
    """Namespaces for the network, the host name, mounts and processes. They exist while their first process runs."""

    def __init__(self, name, hosts_file):
        self.name, self.network = name, None
        setup = 'hostname "$0"; mount --bind "$1" /etc/hosts; ip link set lo up; echo ready; exec cat'
        command = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command += ["--propagation", "private", "sh", "-c", setup, name, hosts_file]
        # `cat` ends when its standard input does, so with this process. Then the kernel ends everything on the host.
        self.holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self.holder.stdout.readline() != b"ready\n":
            self.end()
            raise RuntimeError(f"{' '.join(command)} did not start a host.")
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text().split()
        self.pid = int(children[0])
        self.network = open(f"/proc/{self.pid}/ns/net")  # while it is open, the cable's other end stays

    def enter(self, command):
        """The command line that runs a command on this host."""
        spaces = ["--net", "--uts", "--mount", "--pid"]
        return ["nsenter", f"--target={self.pid}", *spaces, f"--wd={os.getcwd()}", "--", *map(str, command)]

    def start(self, command, **options):
        """Start a command on this host; return its Popen."""
        return subprocess.Popen(self.enter(command), **options)

    def run(self, *command):
        """Run a command on this host; return what it prints. Raises CalledProcessError where it fails."""
        return subprocess.run(self.enter(command), check=True, capture_output=True, text=True, timeout=60).stdout

    def cut(self):
        """Pull the cable."""
        self.run("ip", "link", "set", INTERFACE, "down")

    def switch_off(self):
        """End everything on this host without a word to its peers, as a loss of power does."""
        self.cut()
        self.holder.kill()
        self.holder.wait()

    def end(self):
        """Remove this host and all that runs on it."""
        self.holder.kill()
        self.holder.wait()
        for file in (self.network, self.holder.stdin, self.holder.stdout):
            if file:
                file.close()


def missing():
    """The reason why this machine cannot have two hosts, or None."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    programs = [program for program in ("unshare", "nsenter", "ip", "mount") if not shutil.which(program)]
    if programs:
        return f"no {', '.join(programs)} on this machine (util-linux and iproute2)"
    spaces = ["--net", "--uts", "--mount", "--pid"]
    if subprocess.run(["unshare", *spaces, "--fork", "true"], capture_output=True).returncode:
        return "this machine lets nobody make a network namespace"
    return None


@contextlib.contextmanager
def two_hosts(own_name=None, aliases=((), ())):
    """A context with (node0, node1), two hosts that a cable joins.

    ``own_name`` is the address that a host looks up for its own name: on Debian "127.0.1.1". ``aliases`` are further
    names of each host, which both hosts know.
    """
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder, contextlib.ExitStack() as stack:
        hosts = []
        for name in NAMES:
            addresses = {"localhost": "127.0.0.1", **ADDRESSES, **({name: own_name} if own_name else {})}
            path = Path(folder, name)
            addresses |= {alias: ADDRESSES[host] for host, more in zip(NAMES, aliases, strict=True) for alias in more}
            path.write_text("".join(f"{address} {alias}\n" for alias, address in addresses.items()))
            host = Host(name, path)
            stack.callback(host.end)
            hosts.append(host)
        # Enter the host's network only, because `ip` needs the other host's process by its number outside.
        cable = ["ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns"]
        subprocess.run(["nsenter", f"--net=/proc/{hosts[0].pid}/ns/net", *cable, str(hosts[1].pid)], check=True)
        for host in hosts:
            host.run("ip", "addr", "add", f"{ADDRESSES[host.name]}/24", "dev", INTERFACE)
            host.run("ip", "link", "set", INTERFACE, "up")
        yield tuple(hosts)
