"""How the doctor's ranks find each other, agree on what they saw, and go on without a rank that is lost.

They agree through a store, never through the process group that they examine. torchrun or rank 0 serves the store.
"""

import contextlib
import faulthandler
import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

REPORT_SECONDS = 5  # seconds that a rank has, after a collective's timeout, to report that timeout
SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
START = "Start the ranks with torchrun or srun; for this machine alone, unset RANK, WORLD_SIZE and LOCAL_RANK."


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


def find_place() -> Place | None:
    """This rank's place, or None where no launcher has set its variables. ValueError: some are missing or wrong."""
    variables = dict(os.environ)
    several = variables.get("SLURM_STEP_NUM_TASKS", "1") != "1"  # a step of one task may be a shell
    if several and "SLURM_STEP_ID" in variables and not variables.get("RANK"):
        variables |= {name: variables[slurm] for name, slurm in SLURM.items()}
        variables.setdefault("MASTER_ADDR", first_host(variables["SLURM_STEP_NODELIST"]))
        # Each job has its own port, so that two jobs that share a node do not meet.
        variables.setdefault("MASTER_PORT", str(20000 + int(variables["SLURM_JOB_ID"]) % 10000))
    if not any(variables.get(name) for name in SLURM):
        return None  # MASTER_ADDR alone means nothing: people export it in their shells
    for name in (*SLURM, "MASTER_ADDR", "MASTER_PORT"):
        if not (text := variables.get(name)):
            raise ValueError(f"Of a launcher's variables, {name} is missing.\n{START}")
        if name != "MASTER_ADDR" and not (text.isdecimal() and int(text) < 1 << 16):
            raise ValueError(f"{name} is {text!r}, which is not a number from 0 to 65535.\n{START}")
    rank, world_size, local_rank, port = (int(variables[name]) for name in (*SLURM, "MASTER_PORT"))
    if rank >= world_size:
        raise ValueError(f"RANK is {rank} and WORLD_SIZE is {world_size}: ranks count from 0.\n{START}")
    return Place(rank, world_size, local_rank, variables["MASTER_ADDR"], port)


def open_store(place: Place, timeout: float) -> tuple[dist.Store, bool]:
    """(the store that all ranks reach, whether this process serves it). MembershipError: there is none in time."""
    host, port = place.host, place.port
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        socket.getaddrinfo(host, port)
        store = dist.TCPStore(host, port, None, serves, timedelta(seconds=timeout), wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        reason = f"Nothing answered at {host}:{port} within {timeout:g} s: rank 0 did not start there, or a firewall "
        reason += f"is between. Try from here: nc -vz {host} {port}"
        if isinstance(error, socket.gaierror):
            reason = f"The host name {host} has no address here. Try getent hosts, or give an address in MASTER_ADDR."
        elif serves:
            reason = f"Port {port} of {host} cannot be opened: {plain(error)}. Choose another MASTER_PORT."
        raise MembershipError(reason) from None
    return dist.PrefixStore(f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store), serves


def plain(error: Exception) -> str:
    """An exception's first line, without the C++ file and line that torch puts before it."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = re.sub(r"\[[^\]]*:\d+\]:?|\S*/\S+:\d+:?", "", lines[0])
    return " ".join(text.split()).rstrip(".")[:200]


class Membership:
    """The ranks that are here, as each of them knows them. All ranks are equal: none of them leads."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
        self.store, self.rank, self.timeout = store, rank, timeout
        self.members = list(range(world_size))  # the ranks that still answer
        self.lost: dict[int, str] = {}  # {rank: the step at which it stopped answering}
        self.errors: dict[str, dict[int, str]] = {}  # {step: {rank: what went wrong}}
        self.backend = "gloo"  # "" where no process group can be started
        self.device, self.groups = torch.device("cpu"), 0

    def wait_for(self, keys: list[str], seconds: float) -> bool:
        """Wait for the store's keys at most so many seconds; return whether all of them are there."""
        try:
            self.store.wait(keys, timedelta(seconds=max(0.5, seconds)))
        except dist.DistError:
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

    def outcomes(self, step: str, work: Callable[[], Any]) -> tuple[dict[int, Any], dict[int, str]]:
        """({rank: what ``work()`` returned, or None}, {rank: what it raised}), of all members."""
        value = error = None
        # Some hangs end by no timeout of torch. Then this process says where it hangs and ends, and its peers go on.
        faulthandler.dump_traceback_later(2 * self.timeout + REPORT_SECONDS, exit=True)
        try:
            value = work()
        except Exception as raised:
            error = plain(raised)
        finally:
            faulthandler.cancel_dump_traceback_later()
        answers = self.gather(step, [value, error])
        errors = {rank: error for rank, (_, error) in answers.items() if error is not None}
        return {rank: value for rank, (value, _) in answers.items()}, errors

    def attempt(self, step: str, work: Callable[[], Any]) -> dict[int, Any]:
        """{rank: what ``work()`` returned, or None where it raised}. After an error or a loss it starts a new group."""
        before = self.members
        values, errors = self.outcomes(step, work)
        if errors:
            self.errors[step] = errors
        if self.groups and (errors or self.members != before):
            self.start_group()  # the old one's connections may be broken
        return values

    def start_group(self) -> None:
        """Start the default process group among the members; on gloo where NCCL cannot start."""
        while self.backend:
            self.groups += 1
            before = self.members
            _, errors = self.outcomes(f"starting group {self.groups}", self.replace_group)
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
