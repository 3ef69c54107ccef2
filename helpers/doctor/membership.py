"""How the doctor's ranks find each other, agree on what they saw, and go on without a rank that is lost.

They exchange what they saw through a store (c10d's TCPStore), and never through the process group that they examine,
because that may be broken. torchrun or rank 0 serves the store.
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

REPORT_SECONDS = 5  # how long a rank whose collective has timed out has to tell the others
VARIABLES_UNDER_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
HIGHEST_PORT = 65535
LONGEST_MESSAGE = 200  # characters of an error that are shown
HOW_TO_START = "Start the ranks with torchrun or srun; for this machine alone, unset RANK, WORLD_SIZE and LOCAL_RANK."


class MembershipError(Exception):
    """This rank cannot take part. The message says why, and the next thing to try."""


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
    """Read this rank's numbers and the store's address from the environment variables that its launcher has set.

    torchrun uses the usual names, such as RANK, and srun its own, such as SLURM_PROCID. Returns None if no launcher
    started this process. Raises ValueError if a variable is missing or wrong.
    """
    variables = dict(environment)
    if is_task_of_step(variables) and not variables.get("RANK"):
        variables |= variables_from_slurm(variables)
    # Some people export MASTER_ADDR in their shells, so that variable alone does not show a launcher.
    has_launcher = any(variables.get(name) for name in VARIABLES_UNDER_SLURM)
    if not has_launcher:
        return None

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
    is_possible_rank = 0 <= launched.rank < launched.world_size
    is_possible_port = 0 <= launched.port <= HIGHEST_PORT
    if not is_possible_rank or not is_possible_port:
        raise ValueError(f"RANK is not below WORLD_SIZE, or there is no such port: {given}.\n{HOW_TO_START}")
    return launched


def is_task_of_step(variables: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several tasks. A single task does not count: it may be a shell."""
    return "SLURM_STEP_ID" in variables and variables.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def variables_from_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables, such as RANK, for a task of srun, from Slurm's variables.

    MASTER_ADDR and MASTER_PORT are left out if the user has set them.
    """
    translated = {name: variables[slurm_name] for name, slurm_name in VARIABLES_UNDER_SLURM.items()}
    if "MASTER_ADDR" not in variables:
        translated["MASTER_ADDR"] = first_host(variables["SLURM_STEP_NODELIST"])
    if "MASTER_PORT" not in variables:
        # Each job has its own port, so that two jobs that share a node do not meet.
        port = 20000 + int(variables["SLURM_JOB_ID"]) % 10000
        translated["MASTER_PORT"] = str(port)
    return translated


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: gpu03 for ``gpu[03-05,9],cpu1``, rack1-node3 for ``rack[1-2]-node[3-4]``."""
    comma_outside_brackets = r",(?![^\[]*\])"  # in "gpu[03-05,9],cpu1" the second comma
    first_entry = re.split(comma_outside_brackets, nodes)[0]  # "gpu[03-05,9]"
    brackets = r"\[(\w+)[^\]]*\]"  # "[03-05,9]", of which the group is "03"
    return re.sub(brackets, r"\1", first_entry)


# --- the store --------------------------------------------------------------------------------------------------------


def serves_store(launched: LaunchedRank) -> bool:
    """Whether this process serves the store: rank 0 does, unless its launcher does."""
    return launched.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def open_store(launched: LaunchedRank, timeout: float) -> dist.Store:
    """Connect to the store through which the ranks exchange their answers, and serve it if that is this rank's task.

    Raises MembershipError if there is no connection within ``timeout`` seconds.
    """
    host = launched.host
    port = launched.port
    is_server = serves_store(launched)
    try:
        socket.getaddrinfo(host, port)  # TCPStore would retry a name without an address until its timeout.
    except socket.gaierror:
        raise MembershipError(
            f"The host name {host} has no address here. Try getent hosts, or give an address in MASTER_ADDR."
        ) from None
    try:
        store = dist.TCPStore(
            host,
            port,
            world_size=None,
            is_master=is_server,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except (RuntimeError, OSError) as error:
        if is_server:
            problem = f"Port {port} of {host} cannot be opened: {plain(error)}. Choose another MASTER_PORT."
        else:
            problem = (
                f"Nothing answered at {host}:{port} within {timeout:g} s: rank 0 did not start there, or a firewall "
                f"is between. Try from here: nc -vz {host} {port}"
            )
        raise MembershipError(problem) from None
    # After a restart, torchrun's store still has the keys of the previous attempt, so each attempt has its own prefix.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"doctor/{attempt}", store)


def plain(error: Exception) -> str:
    """An exception's message as part of a sentence: its first line, without a full stop or places in C++ files.

    "[/build/gloo/pair.cc:42] out of order." becomes "out of order". Without a message it is the exception's name.
    """
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    place_in_brackets = r"\[[^\]]*:\d+\]:?"  # "[socket.cpp:1024]"
    bare_place = r"\S*/\S+:\d+:?"  # "/torch/csrc/distributed/c10d/TCPStore.cpp:83"
    text = re.sub(f"{place_in_brackets}|{bare_place}", "", lines[0])
    text = " ".join(text.split()).rstrip(".")
    return text[:LONGEST_MESSAGE]


# --- the members ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcomes:
    """What a piece of work returned or raised on each member."""

    values: dict[int, Any]  # {rank: what it returned, or None where it raised}
    errors: dict[int, str]  # {rank where it raised: the error}


class Membership:
    """The members, which are the ranks that still answer, as one of them knows them.

    Each rank has such an object, and all ranks call the same methods in the same order. No rank leads the others: they
    decide together by what is in the store, so a step goes on without a rank that has died or hangs.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
        """All ranks are members at first. ``timeout``: seconds that a step may take before a rank counts as lost."""
        self.store = store
        self.rank = rank
        self.timeout = timeout
        # What is known of all ranks.
        self.members = list(range(world_size))  # those that still answer
        self.lost: dict[int, str] = {}  # {rank: the step at which it stopped answering}
        self.errors: dict[str, dict[int, str]] = {}  # {step: {rank: what it raised}}
        # The process group that is examined.
        self.backend = "gloo"  # "" if no process group can be started
        self.device = torch.device("cpu")  # of its tensors
        self.groups_started = 0  # how many have been started so far

    def wait_for(self, keys: list[str], seconds: float) -> bool:
        """Wait at most so many seconds for keys of the store, and return whether all of them are there."""
        fewest_seconds = 0.5  # The store needs some time to answer, even if nothing has to be waited for.
        try:
            self.store.wait(keys, timedelta(seconds=max(fewest_seconds, seconds)))
        except dist.DistError:
            return False
        return True

    def gather(self, step: str, answer: Any, patience: float | None = None) -> dict[int, Any]:
        """Exchange answers: give this rank's to all members, and return {rank: answer} of all, the same on every rank.

        ``step`` is a name for this exchange alone. The exchange ends when the last member has answered, or when a
        member has waited ``patience`` seconds. A member that has not answered by then is lost: the others go on without
        it, and on that member itself this raises MembershipError.
        """
        if patience is None:
            patience = self.timeout + REPORT_SECONDS
        key_of_all_answers = f"{step}/all"
        self.store.set(f"{step}/{self.rank}", pickle.dumps(answer))
        number_of_answers = self.store.add(f"{step}/count", 1)  # It includes this rank's own.
        is_last = number_of_answers == len(self.members)
        if is_last or not self.wait_for([key_of_all_answers], patience):
            self.close_exchange(step, key_of_all_answers)

        answers = pickle.loads(self.store.get(key_of_all_answers))
        if self.rank not in answers:
            raise MembershipError("The others went on without this rank: it was too slow. Try a longer --timeout.")
        for rank in self.members:
            if rank not in answers:
                self.lost[rank] = step
        self.members = sorted(answers)
        return answers

    def close_exchange(self, step: str, key_of_all_answers: str) -> None:
        """Decide which answers count: those that are in the store now, unless another rank has decided already.

        Several ranks may get here at the same time and see different answers. compare_set writes only if the key has no
        value yet, so the first rank decides for all, and they cannot disagree about who is lost.
        """
        answered = [rank for rank in self.members if self.store.check([f"{step}/{rank}"])]
        answers_seen_here = {rank: pickle.loads(self.store.get(f"{step}/{rank}")) for rank in answered}
        no_value = ""
        self.store.compare_set(key_of_all_answers, no_value, pickle.dumps(answers_seen_here))

    def outcomes(self, step: str, work: Callable[[], Any]) -> Outcomes:
        """Call ``work`` on all members, and return on each of them what it returned or raised on all.

        ``step`` is a name for this work alone.
        """
        value = None
        error = None
        # No timeout of torch ends some hangs. faulthandler then prints where this process hangs and ends it, and the
        # other ranks go on without it.
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
        """Call ``work`` on all members, and go on even if it raises an error somewhere or a member is lost.

        Returns {rank: what the work returned there, or None where it raised}. Errors are added to ``self.errors`` under
        the name ``step``. After an error or the loss of a member, a new process group replaces the old one, whose
        connections may be broken.
        """
        members_before = self.members
        outcomes = self.outcomes(step, work)
        if outcomes.errors:
            self.errors[step] = outcomes.errors
        has_group = self.groups_started > 0
        may_be_broken = bool(outcomes.errors) or self.members != members_before
        if has_group and may_be_broken:
            self.start_group()
        return outcomes.values

    def start_group(self) -> None:
        """Start the default process group among the members: on ``self.backend``, and on gloo if NCCL fails.

        If gloo fails, too, there is no group, and ``self.backend`` is "" afterwards. If a member is lost during the
        start, the others start again on the same backend.
        """
        while self.backend:
            self.groups_started += 1
            members_before = self.members
            outcomes = self.outcomes(f"starting group {self.groups_started}", self.replace_group)
            lost_a_member = self.members != members_before
            if lost_a_member:
                continue
            if not outcomes.errors:
                return
            self.errors[f"starting a group on {self.backend}"] = outcomes.errors
            self.use_next_backend()

    def use_next_backend(self) -> None:
        """Change from NCCL to gloo, whose tensors are on the CPU, or from gloo to no backend."""
        self.device = torch.device("cpu")
        if self.backend == "nccl":
            self.backend = "gloo"
        else:
            self.backend = ""

    def replace_group(self) -> None:
        """End the process group, if there is one, and start a new one among the members."""
        with contextlib.suppress(Exception):  # The first time there is no group, and a broken group may raise anything.
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
