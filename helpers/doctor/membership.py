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
    """This rank's numbers and its store's address, from the environment variables that its launcher has set.

    torchrun sets them under their usual names, and srun under its own. None where no launcher has started this process.
    Raises ValueError if some of them are missing or wrong.
    """
    variables = dict(environment)
    if is_task_of_step(variables) and not variables.get("RANK"):
        variables |= variables_from_slurm(variables)
    # People export MASTER_ADDR in their shells, so it alone does not mean that there is a launcher.
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
    """Whether srun started this process as one of several tasks. A single task may be a shell, which is no launcher."""
    return "SLURM_STEP_ID" in variables and variables.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def variables_from_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for a task of srun. An address and a port that the user has set stay as they are."""
    translated = {name: variables[slurm_name] for name, slurm_name in VARIABLES_UNDER_SLURM.items()}
    if "MASTER_ADDR" not in variables:
        translated["MASTER_ADDR"] = first_host(variables["SLURM_STEP_NODELIST"])
    if "MASTER_PORT" not in variables:
        # Each job has its own port, so that two jobs that share a node do not meet.
        port = 20000 + int(variables["SLURM_JOB_ID"]) % 10000
        translated["MASTER_PORT"] = str(port)
    return translated


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: gpu03 for ``gpu[03-05,9]``, rack1-node3 for ``rack[1-2]-node[3-4]``."""
    comma_outside_brackets = r",(?![^\[]*\])"
    first_entry = re.split(comma_outside_brackets, nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first_entry)  # of each pair of brackets the first number


# --- the store --------------------------------------------------------------------------------------------------------


def serves_store(launched: LaunchedRank) -> bool:
    """Whether this process serves the store: rank 0 does, unless its launcher does."""
    return launched.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def open_store(launched: LaunchedRank, timeout: float) -> dist.Store:
    """Connect to the store through which the ranks exchange their answers, or serve it, if this rank has to.

    Raises MembershipError if there is no connection within ``timeout`` seconds.
    """
    host = launched.host
    port = launched.port
    is_server = serves_store(launched)
    try:
        socket.getaddrinfo(host, port)  # TCPStore would try a name without an address until its timeout.
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
    # After a restart torchrun's store still has the keys of the attempt before.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"doctor/{attempt}", store)


def plain(error: Exception) -> str:
    """An exception's message as part of a sentence: its first line, without the C++ file and line before it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    longest = 200  # characters
    in_brackets = r"\[[^\]]*:\d+\]:?"  # "[socket.cpp:1024]"
    bare = r"\S*/\S+:\d+:?"  # "/torch/csrc/distributed/c10d/TCPStore.cpp:83"
    text = re.sub(f"{in_brackets}|{bare}", "", lines[0])
    return " ".join(text.split()).rstrip(".")[:longest]


# --- the members ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcomes:
    """What became of some work on all members."""

    values: dict[int, Any]  # by rank; None where the work raised
    errors: dict[int, str]  # of the ranks where it raised


class Membership:
    """The members, which are the ranks that still answer, as one of them knows them.

    Each rank has such an object, and calls the same methods in the same order. No rank leads: what the ranks decide
    together, they decide by what is in the store. So a step goes on without a rank that has died or hangs.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
        """All ranks are members at first. ``timeout``: seconds that a step may take before a rank counts as lost."""
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
        at_least = 0.5  # seconds: also who has no patience left lets the store answer
        try:
            self.store.wait(keys, timedelta(seconds=max(at_least, seconds)))
        except dist.DistError:
            return False
        return True

    def gather(self, step: str, answer: Any, patience: float | None = None) -> dict[int, Any]:
        """Exchange answers: give this rank's to all members, and return {rank: answer} of all, the same on every rank.

        ``step`` is a name for the exchange, which no other one has. The exchange ends when the last member has
        answered, or when the first of those that wait has waited ``patience`` seconds. A member that has not answered
        by then is lost: the others go on without it, and on that member itself this raises MembershipError.
        """
        if patience is None:
            patience = self.timeout + REPORT_SECONDS
        key_of_all_answers = f"{step}/all"
        self.store.set(f"{step}/{self.rank}", pickle.dumps(answer))
        number_of_answers = self.store.add(f"{step}/count", 1)  # with this rank's own
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

        Several ranks may get here at a time, and see different answers. compare_set writes only where there is no value
        yet, so the first of them decides for all, and the ranks cannot disagree about who is lost.
        """
        answered = [rank for rank in self.members if self.store.check([f"{step}/{rank}"])]
        answers_seen_here = {rank: pickle.loads(self.store.get(f"{step}/{rank}")) for rank in answered}
        no_value = ""
        self.store.compare_set(key_of_all_answers, no_value, pickle.dumps(answers_seen_here))

    def outcomes(self, step: str, work: Callable[[], Any]) -> Outcomes:
        """Call ``work`` on all members, and return on each what it returned or raised on all of them.

        ``step`` is a name for the work, which no other one has.
        """
        value = None
        error = None
        # Some hangs end by no timeout of torch. Then this process prints where it hangs and ends, and its peers go on.
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
        """Call ``work`` on all members, and go on even if it raises somewhere, or a member is lost meanwhile.

        Returns {rank: what the work returned there, or None where it raised}. Errors are kept in ``self.errors`` under
        the name ``step``. After an error, or the loss of a member, the process group is replaced by a new one, because
        its connections may be broken.
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
        """Start the default process group among the members, on gloo if NCCL fails.

        If gloo fails, too, ``self.backend`` is "" afterwards, and there is no group. If a member is lost meanwhile, the
        others start once more, on the same backend.
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
        """Go from NCCL to gloo, which has its tensors on the CPU, and from gloo to none."""
        self.device = torch.device("cpu")
        if self.backend == "nccl":
            self.backend = "gloo"
        else:
            self.backend = ""

    def replace_group(self) -> None:
        """Start a process group among the members, in place of the one before."""
        with contextlib.suppress(Exception):  # there is no group at first, and a broken one may not end well
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
