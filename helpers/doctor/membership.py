"""How the doctor's ranks find each other, agree on what they saw, and go on without a rank that is lost.

They agree through a store, never through the process group that they examine. torchrun or rank 0 serves the store.
"""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

REPORT_SECONDS = 5  # seconds that a rank has, after a collective's timeout, to report that timeout


LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class MembershipError(Exception):
    """This rank cannot take part; the message says why, and the next thing to try."""


def first_host(nodes):
    """The first host of a Slurm node list: gpu03 for ``gpu[03-05,9]``."""
    prefix, first, suffix = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^\[,]*)", nodes).groups()
    return f"{prefix}{first or ''}{suffix}"


def launcher_variables():
    """LAUNCHER_VARIABLES as a dict, numbers as int; {} where none is set. RuntimeError if some are missing or wrong."""
    given = {name: os.environ.get(name) for name in LAUNCHER_VARIABLES}
    present = [name for name in LAUNCHER_VARIABLES[:3] if given[name]]
    if not present:
        return {}  # MASTER_ADDR alone means nothing: people export it in their shells
    remedy = "Start the ranks with torchrun or srun; for this machine alone, unset RANK, WORLD_SIZE and LOCAL_RANK."
    if missing := [name for name in LAUNCHER_VARIABLES if not given[name]]:
        are = "is" if len(missing) == 1 else "are"
        raise RuntimeError(f"{present[0]} is set, but {' and '.join(missing)} {are} missing.\n{remedy}")
    for name in LAUNCHER_VARIABLES:
        if name != "MASTER_ADDR":
            if not re.fullmatch("[0-9]{1,9}", given[name]):
                raise RuntimeError(f"{name} is {given[name]!r}, which is not a number.\n{remedy}")
            given[name] = int(given[name])
    rank, world_size = given["RANK"], given["WORLD_SIZE"]
    if rank >= world_size:
        raise RuntimeError(f"RANK is {rank} and WORLD_SIZE is {world_size}: ranks count from 0.\n{remedy}")
    return given


def find_place(master=None):
    """This rank's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as a dict; {} where no launcher set them.

    ``master`` is HOST or HOST:PORT, and overrides the environment. A Slurm step of one task counts as no launcher: it
    may be a shell. Raises RuntimeError for variables that are missing or wrong, ValueError for a wrong ``master``.
    """
    slurm, given = os.environ, {}
    if not slurm.get("RANK") and "SLURM_STEP_ID" in slurm and int(slurm.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        given = {
            "RANK": int(slurm["SLURM_PROCID"]),
            "WORLD_SIZE": int(slurm["SLURM_STEP_NUM_TASKS"]),
            "LOCAL_RANK": int(slurm["SLURM_LOCALID"]),
            "MASTER_ADDR": slurm.get("MASTER_ADDR") or first_host(slurm["SLURM_STEP_NODELIST"]),
            # each step has its own port, so that two jobs that share a node do not meet
            "MASTER_PORT": int(slurm.get("MASTER_PORT") or 20000 + int(slurm["SLURM_JOB_ID"]) % 10000),
        }
    else:
        given = launcher_variables()
    if given and master:
        host, _, port = master.partition(":")
        if not host or not (port or "0").isdecimal():
            raise RuntimeError(f"--master {master!r} is not HOST or HOST:PORT. Try --master node1:29500")
        given |= {"MASTER_ADDR": host, "MASTER_PORT": int(port or given["MASTER_PORT"])}
    return given


def open_store(place, timeout):
    """(the store that all ranks reach, whether this process serves it).

    ``timeout`` is in seconds. Raises MembershipError where the store cannot be served or reached.
    """
    rank, host, port = place["RANK"], place["MASTER_ADDR"], place["MASTER_PORT"]
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        socket.getaddrinfo(host, port)
        store = dist.TCPStore(host, port, None, serves, timedelta(seconds=timeout), wait_for_workers=False)
    except socket.gaierror:
        raise MembershipError(
            f"The host name {host} has no address here. Try: getent hosts {host}; or give an address in MASTER_ADDR."
        ) from None
    except (RuntimeError, OSError) as error:
        if serves:
            raise MembershipError(
                f"Port {port} of {host} cannot be opened: {plain(error)}. Another job may have it: choose another "
                "MASTER_PORT."
            ) from None
        raise MembershipError(
            f"Nothing answered at {host}:{port} within {timeout:g} s: rank 0 did not start there, or a firewall is "
            f"between. Try from here: nc -vz {host} {port}"
        ) from None
    return dist.PrefixStore(f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store), serves


def plain(error):
    """An exception's first line, without the C++ file and line that torch puts before it."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = re.sub(r"\[[^\]]*:\d+\]:?|\S*/\S+:\d+:?", "", lines[0])
    return " ".join(text.split()).rstrip(".")[:200]


class Membership:
    """The ranks that are here, as each of them knows them.

    ``members`` are the ranks that still answer; ``lost`` is {rank: the step at which it stopped answering}; ``errors``
    is {step: {rank: what went wrong}}; ``skew`` is how far this rank's clock is ahead of the leader's, in seconds.
    """

    def __init__(self, store, rank, world_size, timeout):
        self.store, self.rank, self.timeout = store, rank, timeout
        self.members, self.lost, self.errors = list(range(world_size)), {}, {}
        self.leader, self.skew = 0, float("inf")
        self.backend, self.device, self.groups = "gloo", torch.device("cpu"), 0
        self.ready = False  # whether all members have a process group

    def wait_for(self, keys, deadline):
        """Wait for the store's keys until the deadline (in time.monotonic()); return whether all of them are there."""
        try:
            self.store.wait(keys, timedelta(seconds=max(0.5, deadline - time.monotonic())))
        except dist.DistStoreError:
            return False
        return True

    def gather(self, step, mine, patience=None):
        """{rank: answer} of all members, the same dict on every rank. Who does not answer in time is removed.

        The leader collects the answers. The first rank that gives up waiting for the leader takes its place.
        ``patience`` is in seconds. Raises MembershipError on a rank that was removed, or whose leader is silent.
        """
        deadline = time.monotonic() + (patience or self.timeout + REPORT_SECONDS)
        self.store.set(f"{step}/{self.rank}", json.dumps(mine))
        if self.rank != self.leader and not self.wait_for([f"{step}/{self.leader}"], deadline):
            self.leader = int(self.store.compare_set(f"{step}/leader", "", str(self.rank)))
        if self.rank == self.leader:
            self.wait_for([f"{step}/{rank}" for rank in self.members], deadline)
            here = [rank for rank in self.members if self.store.check([f"{step}/{rank}"])]
            answers = {rank: json.loads(self.store.get(f"{step}/{rank}")) for rank in here}
            agreed = json.dumps({"leader": self.rank, "answers": answers, "at": time.time()})
            self.store.compare_set(f"{step}/all", "", agreed)  # the first rank that writes the key decides
        if not self.wait_for([f"{step}/all"], deadline + self.timeout + 2 * REPORT_SECONDS):
            raise MembershipError(f"Rank {self.leader} has stopped answering. Look at its own output.")
        now, agreed = time.time(), json.loads(self.store.get(f"{step}/all"))
        answers = {int(rank): answer for rank, answer in agreed["answers"].items()}
        if self.rank not in answers:
            raise MembershipError("The others went on without this rank: it was too slow. Try a longer --timeout.")
        # The leader's time takes a moment to arrive, or is read late. So the smallest of many differences is best.
        self.skew = now - agreed["at"] if agreed["leader"] != self.leader else min(self.skew, now - agreed["at"])
        self.lost |= {rank: step for rank in self.members if rank not in answers}
        self.members, self.leader = sorted(answers), agreed["leader"]
        return answers

    def restrict_to(self, members):
        """Go on with these members alone; every rank calls this. Raises MembershipError on a rank that is left out."""
        if members != self.members:
            self.members, self.leader, self.skew = members, members[0], float("inf")
        if self.rank not in members:
            raise MembershipError(
                "This rank has no TCP connection to some others, which go on without it. See their report."
            )

    def attempt(self, step, work):
        """{rank: what ``work()`` returned, or None where it raised}. After an error or a loss it starts a new group."""
        before, answer = self.members, {}
        with self.no_longer_than(2 * self.timeout + REPORT_SECONDS):
            try:
                answer["value"] = work()
            except Exception as error:
                answer["error"] = plain(error)
        answers = self.gather(step, answer)
        if errors := {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}:
            self.errors[step] = errors
        if self.ready and (errors or self.members != before):
            self.start_group()  # the old one's connections may be broken
        return {rank: answer.get("value") for rank, answer in answers.items()}

    def start_group(self):
        """Start the default process group among the members; on gloo where NCCL cannot start."""
        self.ready = False
        while not self.ready and self.backend:
            self.groups += 1
            before, self.ready = self.members, False
            index = before.index(self.rank)
            on = {"device_id": self.device} if self.device.type == "cuda" else {}
            try:
                with self.no_longer_than(2 * self.timeout + REPORT_SECONDS):
                    with contextlib.suppress(Exception):
                        dist.destroy_process_group()
                    store = dist.PrefixStore(f"group{self.groups}", self.store)
                    limit = timedelta(seconds=self.timeout)
                    dist.init_process_group(
                        self.backend, store=store, rank=index, world_size=len(before), timeout=limit, **on
                    )
                error = None
            except Exception as raised:
                error = plain(raised)
            answers = self.gather(f"starting group {self.groups}", error)
            if errors := {rank: error for rank, error in answers.items() if error}:
                if self.members == before:
                    self.errors[f"starting a group on {self.backend}"] = errors
                    self.backend = "gloo" if self.backend == "nccl" else None
                    self.device = torch.device("cpu")
            else:
                self.ready = self.members == before

    @contextlib.contextmanager
    def no_longer_than(self, seconds):
        """End this process if the block takes longer, because no timeout of torch ends some hangs. Its peers go on."""

        def leave():
            print(f"rank {self.rank} hangs; it leaves, and the others go on", file=sys.stderr, flush=True)
            os._exit(1)

        timer = threading.Timer(seconds, leave)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
