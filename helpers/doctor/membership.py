"""How the doctor's ranks find each other, agree on what they saw, and go on without a rank that is lost.

They agree through a store, never through the process group that they examine. torchrun or rank 0 serves the store.
"""

import contextlib
import faulthandler
import os
import pickle
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

REPORT_SECONDS = 5  # A rank whose collective has timed out has so many seconds to tell the others.
VARIABLES_UNDER_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
HIGHEST_PORT = 65535
HOW_TO_START = "Start the ranks with torchrun or srun; for this machine alone, unset RANK, WORLD_SIZE and LOCAL_RANK."


class MembershipError(Exception):
    """This rank cannot take part; the message says why, and the next thing to try."""


# --- what the launcher says -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaunchedRank:
    """This rank's numbers, and the host and port where rank 0, or torchrun, serves the store."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int


def read_launcher(environment: Mapping[str, str]) -> LaunchedRank | None:
    """What torchrun's variables say of this rank, or else Slurm's; None where no launcher has set its own.

    Raises ValueError if some of them are missing or wrong.
    """
    variables = dict(environment)
    if is_task_of_step(variables) and not variables.get("RANK"):
        variables |= {name: variables[slurm_name] for name, slurm_name in VARIABLES_UNDER_SLURM.items()}
        variables.setdefault("MASTER_ADDR", first_host(variables["SLURM_STEP_NODELIST"]))
        # Each job has its own port, so that two jobs that share a node do not meet.
        variables.setdefault("MASTER_PORT", str(20000 + int(variables["SLURM_JOB_ID"]) % 10000))
    if not any(variables.get(name) for name in VARIABLES_UNDER_SLURM):
        return None  # People export MASTER_ADDR in their shells, so it alone means nothing.

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    given = ", ".join(f"{name}={variables.get(name, '')}" for name in names)
    try:
        launched = LaunchedRank(
            rank=int(variables["RANK"]),
            world_size=int(variables["WORLD_SIZE"]),
            local_rank=int(variables["LOCAL_RANK"]),
            host=variables["MASTER_ADDR"],
            port=int(variables["MASTER_PORT"]),
        )
    except (KeyError, ValueError):
        raise ValueError(f"A launcher's variable is missing, or is no number: {given}.\n{HOW_TO_START}") from None
    if not 0 <= launched.rank < launched.world_size or not 0 <= launched.port <= HIGHEST_PORT:
        raise ValueError(f"RANK is not below WORLD_SIZE, or there is no such port: {given}.\n{HOW_TO_START}")
    return launched


def is_task_of_step(variables: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several tasks. A step of one task may be a shell."""
    return "SLURM_STEP_ID" in variables and variables.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: gpu03 for ``gpu[03-05,9]``, rack1-node3 for ``rack[1-2]-node[3-4]``."""
    first_entry = re.split(r",(?![^\[]*\])", nodes)[0]  # A comma within brackets is part of the entry.
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first_entry)


# --- the store --------------------------------------------------------------------------------------------------------


def serves_store(launched: LaunchedRank) -> bool:
    """Whether this process serves the store: rank 0 does, unless its launcher does."""
    return launched.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def open_store(launched: LaunchedRank, timeout: float) -> dist.Store:
    """The store that all ranks reach. Raises MembershipError where there is none within ``timeout`` seconds."""
    host = launched.host
    port = launched.port
    is_server = serves_store(launched)
    try:
        socket.getaddrinfo(host, port)
        store = dist.TCPStore(host, port, None, is_server, timedelta(seconds=timeout), wait_for_workers=False)
    except socket.gaierror:
        raise MembershipError(
            f"The host name {host} has no address here. Try getent hosts, or give an address in MASTER_ADDR."
        ) from None
    except (RuntimeError, OSError) as error:
        if is_server:
            raise MembershipError(
                f"Port {port} of {host} cannot be opened: {plain(error)}. Choose another MASTER_PORT."
            ) from None
        raise MembershipError(
            f"Nothing answered at {host}:{port} within {timeout:g} s: rank 0 did not start there, or a firewall "
            f"is between. Try from here: nc -vz {host} {port}"
        ) from None
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"doctor/{restart}", store)


def plain(error: Exception) -> str:
    """An exception's first line, without the C++ file and line that torch puts before it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = re.sub(r"\[[^\]]*:\d+\]:?|\S*/\S+:\d+:?", "", lines[0])
    return " ".join(text.split()).rstrip(".")[:200]


# --- the members ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcomes:
    """What became of some work on all members."""

    values: dict[int, Any]  # by rank; None where the work raised
    errors: dict[int, str]  # of the ranks where it raised


class Membership:
    """The ranks that still answer, as each of them knows them. All ranks are equal: none of them leads."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
        self.store = store
        self.rank = rank
        self.timeout = timeout
        self.members = list(range(world_size))
        self.lost: dict[int, str] = {}  # {rank: the step at which it stopped answering}
        self.errors: dict[str, dict[int, str]] = {}  # {step: {rank: what it raised}}
        self.backend = "gloo"  # "" where no process group can be started
        self.device = torch.device("cpu")
        self.groups_started = 0

    def wait_for(self, keys: list[str], seconds: float) -> bool:
        """Wait for the store's keys at most so many seconds; return whether all of them are there."""
        try:
            self.store.wait(keys, timedelta(seconds=max(0.5, seconds)))
        except dist.DistError:
            return False
        return True

    def gather(self, step: str, answer: Any, patience: float | None = None) -> dict[int, Any]:
        """{rank: answer} of all members, the same on every rank.

        The last rank to answer closes the step, or the first that loses patience, in seconds: it writes down the
        answers that are there. Whoever is not among them is lost; on that rank this raises MembershipError.
        """
        if patience is None:
            patience = self.timeout + REPORT_SECONDS
        self.store.set(f"{step}/{self.rank}", pickle.dumps(answer))
        is_last = self.store.add(f"{step}/count", 1) == len(self.members)
        if is_last or not self.wait_for([f"{step}/all"], patience):
            answered = [rank for rank in self.members if self.store.check([f"{step}/{rank}"])]
            answers = {rank: pickle.loads(self.store.get(f"{step}/{rank}")) for rank in answered}
            # The first rank that writes the key decides for all, so the ranks cannot disagree about who is lost.
            self.store.compare_set(f"{step}/all", "", pickle.dumps(answers))

        answers = pickle.loads(self.store.get(f"{step}/all"))
        if self.rank not in answers:
            raise MembershipError("The others went on without this rank: it was too slow. Try a longer --timeout.")
        for rank in self.members:
            if rank not in answers:
                self.lost[rank] = step
        self.members = sorted(answers)
        return answers

    def outcomes(self, step: str, work: Callable[[], Any]) -> Outcomes:
        """Do some work, and learn what became of it on all members."""
        value = None
        error = None
        # Some hangs end by no timeout of torch. Then this process says where it hangs and ends, and its peers go on.
        faulthandler.dump_traceback_later(2 * self.timeout + REPORT_SECONDS, exit=True)
        try:
            value = work()
        except Exception as raised:
            error = plain(raised)
        finally:
            faulthandler.cancel_dump_traceback_later()
        answers = self.gather(step, {"value": value, "error": error})
        values = {rank: answer["value"] for rank, answer in answers.items()}
        errors = {rank: answer["error"] for rank, answer in answers.items() if answer["error"] is not None}
        return Outcomes(values, errors)

    def attempt(self, step: str, work: Callable[[], Any]) -> dict[int, Any]:
        """{rank: what ``work()`` returned, or None where it raised}. After an error or a loss it starts a new group."""
        members_before = self.members
        outcomes = self.outcomes(step, work)
        if outcomes.errors:
            self.errors[step] = outcomes.errors
        has_group = self.groups_started > 0
        if has_group and (outcomes.errors or self.members != members_before):
            self.start_group()  # The old one's connections may be broken.
        return outcomes.values

    def start_group(self) -> None:
        """Start the default process group among the members; on gloo where NCCL cannot start."""
        while self.backend:
            self.groups_started += 1
            members_before = self.members
            outcomes = self.outcomes(f"starting group {self.groups_started}", self.replace_group)
            if self.members != members_before:
                continue  # Those that are left start again.
            if not outcomes.errors:
                return
            self.errors[f"starting a group on {self.backend}"] = outcomes.errors
            self.device = torch.device("cpu")
            if self.backend == "nccl":
                self.backend = "gloo"
            else:
                self.backend = ""

    def replace_group(self) -> None:
        """Start a process group among the members, in place of the one before."""
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        bound_device = None
        if self.device.type == "cuda":
            bound_device = self.device
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore(f"group{self.groups_started}", self.store),
            rank=self.members.index(self.rank),
            world_size=len(self.members),
            timeout=timedelta(seconds=self.timeout),
            device_id=bound_device,
        )
