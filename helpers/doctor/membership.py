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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

REPORT_SECONDS = 5  # seconds that a rank has, after a collective's timeout, to report that timeout
SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
LAUNCHER_VARIABLES = (*SLURM, "MASTER_ADDR", "MASTER_PORT")


class MembershipError(Exception):
    """This rank cannot take part; the message says why, and the next thing to try."""


@dataclass(frozen=True)
class Place:
    """This rank's numbers, and the host and port where rank 0, or torchrun, serves the store."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: gpu03 for ``gpu[03-05,9]``, rack1-node3 for ``rack[1-2]-node[3-4]``."""
    entry = re.split(r",(?![^\[]*\])", nodes)[0]  # a comma within brackets is part of the entry
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", entry)


def launcher_variables() -> dict[str, str]:
    """LAUNCHER_VARIABLES from the environment, or in a Slurm step from Slurm's own; "" for one that is not set."""
    environment = os.environ
    variables = {name: environment.get(name, "") for name in LAUNCHER_VARIABLES}
    several = environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"  # a step of one task may be a shell
    if several and "SLURM_STEP_ID" in environment and not variables["RANK"]:
        variables |= {name: environment[slurm] for name, slurm in SLURM.items()}
        variables["MASTER_ADDR"] = variables["MASTER_ADDR"] or first_host(environment["SLURM_STEP_NODELIST"])
        # Each job has its own port, so that two jobs that share a node do not meet.
        variables["MASTER_PORT"] = variables["MASTER_PORT"] or str(20000 + int(environment["SLURM_JOB_ID"]) % 10000)
    return variables


def find_place() -> Place | None:
    """This rank's place, or None where no launcher has set its variables. ValueError: some are missing or wrong."""
    variables = launcher_variables()
    present = next((name for name in SLURM if variables[name]), None)
    if not present:
        return None  # MASTER_ADDR alone means nothing: people export it in their shells
    remedy = "Start the ranks with torchrun or srun; for this machine alone, unset RANK, WORLD_SIZE and LOCAL_RANK."
    if missing := [name for name in LAUNCHER_VARIABLES if not variables[name]]:
        are = "is" if len(missing) == 1 else "are"
        raise ValueError(f"{present} is set, but {' and '.join(missing)} {are} missing.\n{remedy}")
    address = variables.pop("MASTER_ADDR")
    for name, text in variables.items():
        if not re.fullmatch("[0-9]{1,9}", text):
            raise ValueError(f"{name} is {text!r}, which is not a number.\n{remedy}")
    rank, world_size, local_rank, port = map(int, variables.values())
    if rank >= world_size:
        raise ValueError(f"RANK is {rank} and WORLD_SIZE is {world_size}: ranks count from 0.\n{remedy}")
    if not 0 < port < 1 << 16:
        raise ValueError(f"MASTER_PORT is {port}, and ports go from 1 to 65535. Try: export MASTER_PORT=29500")
    return Place(rank, world_size, local_rank, address, port)


def open_store(place: Place, timeout: float) -> tuple[dist.Store, bool]:
    """(the store that all ranks reach, whether this process serves it).

    ``timeout`` is in seconds. Raises MembershipError where the store cannot be served or reached.
    """
    host, port = place.host, place.port
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        socket.getaddrinfo(host, port)
        store = dist.TCPStore(host, port, None, serves, timedelta(seconds=timeout), wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        if isinstance(error, socket.gaierror):
            symptom = f"The host name {host} has no address here."
            remedy = f"Try: getent hosts {host}; or give an address in MASTER_ADDR."
        elif serves:
            symptom = f"Port {port} of {host} cannot be opened: {plain(error)}."
            remedy = "Another job may have it: choose another MASTER_PORT."
        else:
            symptom = f"Nothing answered at {host}:{port} within {timeout:g} s:"
            remedy = f"rank 0 did not start there, or a firewall is between. Try from here: nc -vz {host} {port}"
        raise MembershipError(f"{symptom} {remedy}") from None
    return dist.PrefixStore(f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store), serves


def plain(error: Exception) -> str:
    """An exception's first line, without the C++ file and line that torch puts before it."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = re.sub(r"\[[^\]]*:\d+\]:?|\S*/\S+:\d+:?", "", lines[0])
    return " ".join(text.split()).rstrip(".")[:200]


class Membership:
    """The ranks that are here, as each of them knows them. All ranks are equal: none of them leads.

    ``members`` are the ranks that still answer; ``lost`` is {rank: the step at which it stopped answering}; ``errors``
    is {step: {rank: what went wrong}}. ``backend`` is "" where no process group can be started.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
        self.store, self.rank, self.timeout = store, rank, timeout
        self.members = list(range(world_size))
        self.lost: dict[int, str] = {}
        self.errors: dict[str, dict[int, str]] = {}
        self.backend, self.device, self.groups = "gloo", torch.device("cpu"), 0

    def wait_for(self, keys: list[str], seconds: float) -> bool:
        """Wait for the store's keys at most so many seconds; return whether all of them are there."""
        try:
            self.store.wait(keys, timedelta(seconds=max(0.5, seconds)))
        except dist.DistStoreError:
            return False
        return True

    def gather(self, step: str, answer: Any, patience: float | None = None) -> dict[int, Any]:
        """{rank: answer} of all members, the same on every rank. Answers travel as JSON, and a dataclass as a dict.

        The last rank to answer closes the step, or the first that loses patience, in seconds: it writes down the
        answers that are there. Who is not among them is lost; on that rank this raises MembershipError.
        """
        self.store.set(f"{step}/{self.rank}", json.dumps(answer, default=asdict))
        complete = self.store.add(f"{step}/count", 1) == len(self.members)
        if complete or not self.wait_for([f"{step}/all"], patience or self.timeout + REPORT_SECONDS):
            here = [rank for rank in self.members if self.store.check([f"{step}/{rank}"])]
            answers = {rank: json.loads(self.store.get(f"{step}/{rank}")) for rank in here}
            self.store.compare_set(f"{step}/all", "", json.dumps(answers))  # the first rank that writes it decides
        answers = {int(rank): answer for rank, answer in json.loads(self.store.get(f"{step}/all")).items()}
        if self.rank not in answers:
            raise MembershipError("The others went on without this rank: it was too slow. Try a longer --timeout.")
        self.lost |= {rank: step for rank in self.members if rank not in answers}
        self.members = sorted(answers)
        return answers

    def outcome(self, work: Callable[[], Any]) -> tuple[Any, str | None]:
        """(what ``work()`` returned, None), or (None, what it raised).

        Some hangs end by no timeout of torch. Then this process ends, and its peers go on.
        """

        def leave() -> None:
            print(f"rank {self.rank} hangs; it leaves, and the others go on", file=sys.stderr, flush=True)
            os._exit(1)

        timer = threading.Timer(2 * self.timeout + REPORT_SECONDS, leave)
        timer.daemon = True
        timer.start()
        try:
            return work(), None
        except Exception as error:
            return None, plain(error)
        finally:
            timer.cancel()

    def attempt(self, step: str, work: Callable[[], Any]) -> dict[int, Any]:
        """{rank: what ``work()`` returned, or None where it raised}. After an error or a loss it starts a new group."""
        before = self.members
        outcomes = self.gather(step, self.outcome(work))
        if errors := {rank: error for rank, (_, error) in outcomes.items() if error is not None}:
            self.errors[step] = errors
        if self.groups and (errors or self.members != before):
            self.start_group()  # the old one's connections may be broken
        return {rank: value for rank, (value, _) in outcomes.items()}

    def start_group(self) -> None:
        """Start the default process group among the members; on gloo where NCCL cannot start."""
        while self.backend:
            self.groups += 1
            before = self.members
            outcomes = self.gather(f"starting group {self.groups}", self.outcome(self.replace_group))
            errors = {rank: error for rank, (_, error) in outcomes.items() if error is not None}
            if self.members == before and not errors:
                return
            if self.members == before:
                self.errors[f"starting a group on {self.backend}"] = errors
                self.backend, self.device = "gloo" if self.backend == "nccl" else "", torch.device("cpu")

    def replace_group(self) -> None:
        """Start a process group among the members, in place of the one before."""
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore(f"group{self.groups}", self.store),
            rank=self.members.index(self.rank),
            world_size=len(self.members),
            timeout=timedelta(seconds=self.timeout),
            device_id=self.device if self.device.type == "cuda" else None,
        )
