"""``with check_training():`` finds mistakes of distributed training that raise no error. Off unless it is called.

Every rank runs it around its training, in an existing process group. While the first steps run, each rank notes
checksums of its batches, weights, gradients and buffers, and who called what. At the end the notes of all ranks are
compared. They travel through the group's store, never through a collective: a rank that makes fewer steps than
another, or that fails, keeps nobody waiting longer than ``patience`` seconds. A finding is reported only if it is
certain. The file needs PyTorch and the standard library alone, so a script can carry it, or be run by it:

    torchrun --nproc-per-node=2 training_check.py train.py --flags-of-the-script

It is one file because it has to be copied as one. Its parts come in the order of a check: what a user calls, the
mistakes that it knows, the notes of a rank, the check from beginning to end, what observes a rank (in six parts, with
the functions that all of them use in front), and the rules that compare the ranks' notes.

"The reader" is whoever reads the report: the author of the training. A "place" is a line of the author's code.
"""

import argparse
import functools
import gc
import itertools
import json
import os
import pickle
import random
import runpy
import socket
import sys
import sysconfig
import threading
import time
import traceback
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.amp import GradScaler
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torch.utils.data import dataloader as dataloader_module
from torch.utils.data._utils.fetch import _MapDatasetFetcher

# --- what a user calls ------------------------------------------------------------------------------------------------
# ``check_training`` is put around a training, and ``main`` is the command that runs an unchanged script inside a check.
# Both begin and end a TrainingCheck, which has all the state.


@contextmanager
def check_training(steps: int = 20, patience: float = 30, allow: Iterable[str] = ()) -> Iterator["TrainingCheck"]:
    """A context around a training that finds mistakes without errors in the first ``steps`` steps of an optimizer.

    Enter it on every rank of a process group. Rank 0 reports to stderr as soon as all ranks have made these steps, or
    at the end of the context. There it waits for what the other ranks have noted, for at most ``patience`` seconds, or
    2 seconds after an exception. ``allow`` are kinds of findings to leave out, such as ["same_order"]; an unknown one
    raises ValueError. At the end, ``findings`` of the context's value has the findings, on each rank.
    """
    check = TrainingCheck(steps, patience, allow)
    check.start()
    hook = register_optimizer_step_post_hook(check.after_step)
    try:
        yield check
    except BaseException:
        check.patience = min(check.patience, 2)  # a peer may wait in a collective until this rank is gone
        raise
    finally:
        hook.remove()
        check.finish()


def main() -> None:
    """The command line: run a script under torchrun, with its flags, and look for mistakes in its training.

    It does what ``check_training`` does. But that context has to be entered inside a process group, and here the script
    makes its process group itself, and may end it before rank 0 has compared what the ranks noted.
    """
    parser = argparse.ArgumentParser(description="Run a script under torchrun, and look for mistakes without errors.")
    parser.add_argument("--steps", type=int, default=200, help="steps of an optimizer to observe (default: 200)")
    parser.add_argument("--allow", action="append", default=[], metavar="KIND", help="a kind of finding to leave out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there, too")
    parser.add_argument("script", help="the script; its own flags follow")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    check = TrainingCheck(args.steps, patience=60, allow=args.allow)
    sys.argv = [args.script, *args.flags]
    sys.path[0] = os.path.dirname(os.path.abspath(args.script))  # as if Python had been given the script
    check.start()
    try:
        runpy.run_path(args.script, run_name="__main__")
    finally:
        observer = check.observer
        observer.stop()
        if observer.record.world_size > 1:
            # The script may have ended its process group, and its store with it. torchrun's store is still there.
            torchrun_store, _rank, _world_size = next(dist.rendezvous("env://"))
            observer.store = torchrun_store
        check.finish()
        if args.json and observer.record.rank == 0:
            findings = [asdict(found) for found in check.findings or []]
            args.json.write_text(json.dumps(findings, indent=1))


# --- the kinds of mistakes --------------------------------------------------------------------------------------------
# All kinds that a check looks for, and what it says of one that it has found. Nothing here changes while it runs.


@dataclass(frozen=True)
class Kind:
    """What is wrong, how to repair it, and the section of the book that explains it.

    A note is reported too, but many programs do it on purpose, so it does not make a check fail.
    """

    title: str
    cure: str
    page: str
    is_note: bool = False


KINDS = {
    "same_samples": Kind(
        "ranks train on the same samples",
        "Give the loader a DistributedSampler, or each rank its own part of the data or its own seed for drawing it.",
        "notebooks/03_samplers.ipynb#who-gets-what",
    ),
    "same_order": Kind(
        "a shuffled order is repeated in the next epoch",
        "Call sampler.set_epoch(epoch) before each epoch's loop.",
        "notebooks/03_samplers.ipynb#what-does-set_epoch-do-to-the-order",
    ),
    "drift": Kind(
        "weights that should be equal differ after a step",
        "Average the gradients before each step, or wrap the model in DistributedDataParallel or fully_shard.",
        "notebooks/14_profiling_debugging.ipynb#have-my-replicas-drifted-apart",
    ),
    "different_start": Kind(
        "replicas began with different weights",
        "Broadcast rank 0's weights before the first step, as DistributedDataParallel does when it is built.",
        "notebooks/04_ddp.ipynb#train-by-hand",
    ),
    "around_the_wrapper": Kind(
        "the model is called around its wrapper",
        "Call the wrapper, model(x): its forward prepares the averaging that backward then does.",
        "notebooks/04_ddp.ipynb#ddp-by-hand",
    ),
    "not_synchronized": Kind(
        "the last micro-batch before a step is not synchronized",
        "Leave no_sync, or call set_requires_gradient_sync(True), for the last micro-batch before optimizer.step().",
        "notebooks/04_ddp.ipynb#accumulate-divide-and-send-once",
    ),
    "stale_optimizer": Kind(
        "the optimizer holds parameters that the model no longer has",
        "Build the optimizer last: after fully_shard, after a conversion of the model, and after a copy of it.",
        "notebooks/06_fsdp.ipynb#an-optimizer-built-too-early",
    ),
    "mesh_of_one": Kind(
        "a model is sharded on a mesh of one rank beside other ranks",
        "Make the mesh of all ranks: init_device_mesh(device_type, (dist.get_world_size(),)).",
        "notebooks/06c_groups_and_meshes.ipynb#a-mesh-is-a-grid-of-groups",
    ),
    "clipped_while_scaled": Kind(
        "gradients are clipped while they are still scaled",
        "Call scaler.unscale_(optimizer) before the gradients are clipped.",
        "notebooks/05_amp.ipynb#unscale-before-you-clip",
    ),
    "nothing_loaded": Kind(
        "load_state_dict(strict=False) fills nothing",
        "Compare the two lists of keys, strip a prefix such as module., and load with strict=True.",
        "notebooks/04b_ddp_in_real_projects.ipynb#strictfalse-and-the-module-prefix",
    ),
    "nothing_restored": Kind(
        "a checkpoint is loaded into what has no place for it",
        "Compare what is asked for with FileSystemReader(path).read_metadata(); use get_state_dict for an optimizer.",
        "notebooks/10b_checkpoints_in_practice.ipynb#what-does-a-load-fill-and-what-does-it-leave",
    ),
    "counted_twice": Kind(
        "a validation counts samples twice",
        "Leave out the sampler's padding: divide range(len(dataset))[rank::world_size], or mask what was added.",
        "notebooks/03_samplers.ipynb#why-does-evaluation-change-with-the-number-of-processes",
    ),
    "same_noise": Kind(
        "dropout or augmentation is the same on ranks whose data differ",
        "Seed each rank differently after the model is built: torch.manual_seed(seed + rank).",
        "notebooks/03_samplers.ipynb#which-seed-on-which-rank",
    ),
    "different_noise": Kind(
        "dropout differs on tensor-parallel ranks that hold the same activation",
        "Seed the ranks of a tensor-parallel group equally, or keep the activation a DTensor.",
        "notebooks/07_tensor_parallel.ipynb#dropout-under-tensor-parallelism",
    ),
    "no_gradient": Kind(
        "an optimizer whose parameters never get a gradient",
        "Look for detach(), no_grad() or .data between these parameters and the loss.",
        "notebooks/04b_ddp_in_real_projects.ipynb#a-parameter-that-no-rank-uses",
    ),
    "different_buffers": Kind(
        "ranks evaluate with different batch statistics",
        "Broadcast rank 0's buffers before the evaluation, or use SyncBatchNorm.",
        "notebooks/04b_ddp_in_real_projects.ipynb#batch-statistics-each-rank-its-own",
    ),
    "rank_alone": Kind(
        "a wrapped model is called on some ranks only",
        "Call the wrapped model equally often on all ranks; for one rank alone, call model.module under no_grad.",
        "notebooks/06_fsdp.ipynb#an-evaluation-with-one-batch-more",
    ),
    "uneven_steps": Kind(
        "a rank leaves out an optimizer step that others make",
        "Decide together: all-reduce the reason to skip a step, so that all ranks skip it.",
        "notebooks/14_profiling_debugging.ipynb#have-my-replicas-drifted-apart",
    ),
    "different_rates": Kind(
        "replicas use different learning rates",
        "Step the scheduler on all ranks, with a metric that was averaged over all ranks.",
        "notebooks/14_profiling_debugging.ipynb#have-my-replicas-drifted-apart",
    ),
    # A note: nanoGPT and many scripts of pytorch/examples log this loss on purpose, as a sign that training goes on. It
    # costs no collective, and no weight depends on it. So a check that failed on it would fail on correct programs.
    "own_loss": Kind(
        "the loss that rank 0 logs is that of its own share",
        "Average what is logged: dist.all_reduce(loss, dist.ReduceOp.AVG), or sums and counts.",
        "notebooks/03_samplers.ipynb#which-loss-does-a-rank-print",
        is_note=True,
    ),
    "wrong_order": Kind(
        "a scheduler or a scaler is stepped out of order",
        "Keep the order backward, scaler.step(optimizer), scaler.update(), scheduler.step().",
        "notebooks/05_amp.ipynb#three-changes-to-a-training-step",
    ),
    "untied": Kind(
        "tied weights are no longer tied",
        "Tie the weights again after to_empty, and after a load with assign=True.",
        "notebooks/06b_fsdp_in_practice.ipynb#my-model-ties-the-embedding-to-the-head",
    ),
    "stream_repeated": Kind(
        "each worker of a stream yields the same samples",
        "Divide the stream in __iter__ by torch.utils.data.get_worker_info(), and by rank.",
        "notebooks/03b_loaders_in_practice.ipynb#a-stream-has-no-indices-to-divide",
    ),
    "same_file": Kind(
        "several ranks write the same file",
        "Save on rank 0 only, or give each rank's file its rank's number.",
        "notebooks/10_checkpointing.ipynb#a-file-that-is-whole-or-not-there",
    ),
}


@dataclass(frozen=True)
class Place:
    """A line of the reader's own code."""

    file: str
    line: int


@dataclass(frozen=True)
class Finding:
    """A mistake. ``page`` is the section of the book that explains it."""

    kind: str
    file: str
    line: int
    ranks: tuple[int, ...]
    sentence: str
    cure: str
    page: str
    is_note: bool = False


def finding(kind: str, place: Place, ranks: Iterable[int], sentence: str) -> Finding:
    """Make a Finding of one of KINDS, such as "same_order", at a line of the user's code, on these ranks.

    ``sentence`` says what is wrong there. How to repair it, and which page of the book explains it, the kind says.
    """
    known = KINDS[kind]
    return Finding(
        kind=kind,
        file=place.file,
        line=place.line,
        ranks=tuple(sorted(ranks)),
        sentence=sentence,
        cure=known.cure,
        page=known.page,
        is_note=known.is_note,
    )


# --- the notes of a rank ----------------------------------------------------------------------------------------------
# What the observers write down, as plain records: a rank's Record has all the others in it. It is pickled and sent to
# rank 0, so it has only numbers, texts and lines of code, and no tensor or module.


@dataclass
class Model:
    """A module that the training loop calls. ``wrapper``: "DDP", "FSDP" or "" for none.

    ``data_ranks`` are the ranks that average its gradients, so their data should differ.
    """

    wrapper: str
    data_ranks: tuple[int, ...]
    communicates: bool = False  # in its own forward, as with experts or a divided sequence
    joins: bool = False  # inside torch's Join, where ranks may make different numbers of steps


@dataclass
class Parameter:
    """A parameter of an optimizer. ``replicas`` are the ranks that should hold the same values, empty if unknown.

    ``kind``: "DDP", "DTensor", "plain", or "mesh of one" for a shard of a mesh that has no other rank.
    """

    model: str
    name: str
    kind: str
    size: int
    replicas: tuple[int, ...]


@dataclass
class Forward:
    """A call of a model while gradients are recorded. ``noise``: the random state with which dropout began."""

    model: str
    place: Place
    inputs: int
    elements: int
    noise: int | None = None


@dataclass
class Calls:
    """How a wrapped model was called before a step. The counts run from the first step on."""

    to_average: int  # calls whose gradients a backward pass would average
    to_broadcast: int  # calls without gradients in which DDP broadcasts its buffers
    averaged: int  # backward passes that averaged the gradients
    synchronized: bool = False  # whether the gradients of a call since the last step are to be averaged
    not_synchronized: Place | None = None  # the last call before the step, if it was in no_sync
    around: Place | None = None  # a call of the wrapped module itself, past its wrapper
    places: list[Place] = field(default_factory=list)  # the lines of the calls that are counted


@dataclass
class Step:
    """One step of an optimizer. The dictionaries from ``before`` on have the parameters' keys (see Record)."""

    optimizer: int  # which of the rank's optimizers, from 0
    number: int  # which of the optimizer's steps, from 1
    place: Place
    rates: tuple[float, ...]  # the learning rate of each group of parameters
    settings: int  # a checksum of the optimizer's other settings
    calls: dict[str, Calls]  # by the model's name
    before: dict[str, int] = field(default_factory=dict)  # checksums of the weights before the first step
    gradients: dict[str, int] = field(default_factory=dict)  # checksums
    gradient_means: dict[str, float] = field(default_factory=dict)  # mean absolute values, of DTensors only
    after: dict[str, int] = field(default_factory=dict)  # checksums of the weights after the step


@dataclass
class Epoch:
    """One pass over a DataLoader."""

    loader: int  # which of the rank's loaders, from 0
    place: Place
    dataset: int | None  # a checksum, or None if the dataset holds nothing that could be summed
    samples: int  # samples of the dataset, or 0 for a stream
    sampler: str  # the name of the sampler's class
    divided: bool  # whether a DistributedSampler divides the dataset among ranks
    shuffled: bool
    sampler_epoch: int  # what set_epoch was given last, or -1 for a sampler that has no epoch
    padded_length: int  # samples of all ranks with those that the sampler repeats, or 0 if it repeats none
    indices: list[int] = field(default_factory=list)  # checksums of the indices of its first batches
    # For each of the first batches a checksum of the random states that loading it changed, or 0 if it changed none:
    noise: list[int] = field(default_factory=list)
    models: list[str] = field(default_factory=list)  # the models that got its batches while gradients were recorded
    steps: int = 0  # steps of an optimizer after a batch of this loader
    evaluated: int = 0  # batches that a model got while no gradients were recorded


@dataclass
class Evaluation:
    """The first call of an evaluation. ``inputs``, ``weights`` and ``buffers`` are checksums."""

    model: str
    number: int  # which of the model's evaluations, from 0
    place: Place
    inputs: int
    weights: int  # of all parameters, or 0 if the model is sharded
    buffers: dict[str, int]  # the batch statistics by their names in the model
    reduced: bool = False  # whether this rank communicated afterwards, as in adding up the ranks' results


@dataclass
class Dropout:
    """A dropout on a tensor-parallel rank: checksums of its input and its output."""

    place: Place
    ranks: tuple[int, ...]  # of the tensor-parallel group
    before: int
    after: int


@dataclass(frozen=True)
class Save:
    """The first time that a rank writes a file with torch.save, after so many steps of its optimizers."""

    steps_made: int
    place: Place


@dataclass
class Record:
    """All notes of one rank.

    A model's name and a parameter's key, such as "DDP Net 1" and "DDP Net 1: weight", are the same on all ranks.
    """

    rank: int = 0
    world_size: int = 1
    host: str = ""
    device: str = ""
    models: dict[str, Model] = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    forwards: list[Forward] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    dropouts: list[Dropout] = field(default_factory=list)
    loss_reads: list[Place] = field(default_factory=list)
    saves: dict[str, Save] = field(default_factory=dict)  # by the file's path
    # What the script's own code communicates, and not DDP, fully_shard or another part of torch for it:
    sent_large: bool = False  # whether it sends tensors that may be gradients or weights
    sent_sizes: set[int] = field(default_factory=set)  # the numbers of elements of the small tensors that it sends
    averages_gradients: bool = False  # whether it sends the gradient of each parameter before a step
    findings: list[Finding] = field(default_factory=list)  # of which one rank can be certain alone
    failures: list[str] = field(default_factory=list)  # tracebacks of this check itself

    def add_finding(self, kind: str, place: Place, sentence: str) -> None:
        """Add a mistake of this rank. ``rank`` may not be known yet, so ``TrainingObserver.stop`` fills it in."""
        self.findings.append(finding(kind, place, (), sentence))


# --- a check, from beginning to end -----------------------------------------------------------------------------------
# A TrainingCheck starts the observation of its rank, puts the rank's notes into the store, and on rank 0 compares the
# notes of all ranks and prints the report. It keeps the observer, and the findings once there are any.


def mistakes_among(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that make a check fail: all but the notes."""
    return [found for found in findings if not found.is_note]


def short_name(file: str) -> str:
    """A file's name without its folder, as the report shows it.

    The file of a notebook's cell, such as /tmp/ipykernel_4711/815.py, is named by a number, which says nothing.
    """
    if "ipykernel_" in file:
        return "notebook cell"
    return os.path.basename(file)


def listed(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 2" or "ranks 0, 1 and 2"."""
    numbers = [str(rank) for rank in sorted(ranks)]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def report(findings: Sequence[Finding], failures: Sequence[str] = ()) -> str:
    """The findings of a check as text for the screen: first the mistakes, then what is often done on purpose.

    ``failures`` are tracebacks of errors in the check itself. The report names one of them, because the check may then
    have missed something.
    """
    lines = ["silent mistakes"]
    if not mistakes_among(findings):
        lines.append(f"  none of the {len(KINDS)} kinds")
    mistakes_first = sorted(findings, key=lambda found: found.is_note)
    for found in mistakes_first:
        label = "note: " if found.is_note else ""
        lines.append(f"  {label}{short_name(found.file)}:{found.line}, {listed(found.ranks)}: {found.sentence}")
        lines.append(f"    {found.cure}")
        lines.append(f"    {found.page}  (--allow {found.kind})")
    if failures:
        error = failures[0].strip().splitlines()[-1]  # a traceback ends with the exception
        lines.append(f"  The check itself failed {len(failures)} times, so it is not complete: {error}")
    return "\n".join(lines)


def check_allowed(allow: Iterable[str]) -> None:
    """Raise ValueError if one of the kinds of findings that a user wants to leave out does not exist."""
    unknown = sorted(set(allow) - set(KINDS))
    if unknown:
        raise ValueError(f"There is no kind {unknown[0]}. Known are {', '.join(KINDS)}.")


class TrainingCheck:
    """A check that runs, or ran. ``findings`` is None until the ranks' notes are compared.

    The ranks communicate through the store of their process group, a dictionary that one process serves. Each rank puts
    its notes there. Rank 0 compares them, prints the report, and puts the findings there for the other ranks. Nobody
    waits in a collective, in which a rank that has failed would never arrive.
    """

    number = itertools.count()  # of the checks of this process; all ranks make the same checks, in the same order

    def __init__(self, steps: int, patience: float, allow: Iterable[str]) -> None:
        """Nothing is observed before ``start``. The arguments are those of ``check_training``."""
        check_allowed(allow)
        self.patience = patience
        self.allow = set(allow)
        self.observer = TrainingObserver(steps)
        self.findings: list[Finding] | None = None
        self.missing: list[int] = []  # ranks whose notes did not come in time
        self.prefix = f"training_check/{next(self.number)}"  # of the store's keys
        self.is_published = False

    def start(self) -> None:
        """Begin the observation of this rank."""
        self.observer.start()
        if dist.is_initialized():
            self.observer.see_group()

    def publish(self) -> None:
        """Put this rank's notes into the store, if they are not there yet. The observer has stopped."""
        if self.is_published or self.observer.store is None:
            return
        self.is_published = True
        record = self.observer.record
        self.observer.store.set(self.key(record.rank), pickle.dumps(record))

    def key(self, rank: int) -> str:
        """Under which key of the store a rank's notes are."""
        return f"{self.prefix}/rank{rank}"

    def present(self) -> list[int]:
        """The ranks whose notes are in the store. Asking waits for nobody."""
        ranks = range(self.observer.record.world_size)
        return [rank for rank in ranks if self.observer.store.check([self.key(rank)])]

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """After each step of any optimizer, by a hook of torch: report, if all ranks have made the steps to observe.

        The observation of this rank ends after the last of these steps, and its notes go into the store. When the notes
        of all ranks are there, rank 0 reports at once, so that nobody has to wait for the end of a long training.
        """
        if not self.observer.is_finished:
            return
        if self.observer.store is None:  # the script has made no process group
            return
        self.publish()
        record = self.observer.record
        is_to_report = record.rank == 0 and self.findings is None
        if is_to_report and len(self.present()) == record.world_size:
            self.compare_ranks()

    def finish(self) -> None:
        """End the observation of this rank, and set ``findings``: on rank 0 by comparing all ranks' notes.

        Rank 0 waits until the notes of the other ranks are in the store, and these wait for its findings, but nobody
        waits longer than ``patience`` seconds.
        """
        self.observer.stop()
        self.observer.remove_hooks()
        if self.findings is not None:  # rank 0 has reported already
            return
        record = self.observer.record
        store = self.observer.store
        if store is None:  # the script has made no process group, so this rank is alone
            self.conclude([record])
            return
        findings_key = f"{self.prefix}/findings"
        try:
            self.publish()
            if record.rank == 0:
                self.wait_for([self.key(rank) for rank in range(record.world_size)])
                self.compare_ranks()  # without the notes of ranks that have not sent them in time
            elif self.wait_for([findings_key]):
                self.findings = pickle.loads(store.get(findings_key))
        except RuntimeError as error:  # the process that served the store has ended
            print(f"silent mistakes: the ranks' notes could not be compared ({error})", file=sys.stderr)

    def wait_for(self, keys: list[str]) -> bool:
        """Wait until all keys are in the store, for at most ``patience`` seconds. Returns whether they are."""
        deadline = time.monotonic() + self.patience
        while not self.observer.store.check(keys):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def compare_ranks(self) -> None:
        """On rank 0: compare the notes that have come, report, and send the findings to the other ranks."""
        store = self.observer.store
        present = self.present()
        self.missing = [rank for rank in range(self.observer.record.world_size) if rank not in present]
        records = [pickle.loads(store.get(self.key(rank))) for rank in present]
        self.conclude(records)
        store.set(f"{self.prefix}/findings", pickle.dumps(self.findings))

    def conclude(self, records: Sequence[Record]) -> None:
        """Set ``findings`` to what these records show, but for the kinds to leave out. Rank 0 prints them, too."""
        self.findings = [found for found in compare(records) if found.kind not in self.allow]
        if self.observer.record.rank != 0:
            return
        failures = [failure for record in records for failure in record.failures]
        print(report(self.findings, failures), file=sys.stderr, flush=True)
        if self.missing:
            print(f"  {listed(self.missing)} sent no notes within {self.patience:g} s", file=sys.stderr, flush=True)


# --- what all observers use: lines of code, and values ----------------------------------------------------------------
# Who called a function is read off the stack of Python's frames. Values are local parts of tensors, because a DTensor's
# own methods communicate. Nothing here keeps state.

LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib")})
TORCH = os.path.dirname(os.path.realpath(torch.__file__))
THIS_FILE = os.path.realpath(__file__)


@functools.cache
def is_readers(file: str) -> bool:
    """Whether a source file is code of the user, who reads the report, and not of a library or of this check.

    A finding has to be at a line that the user can change, so lines of torch, of Python and of packages do not count.
    """
    if file.startswith("<frozen"):  # a part of Python
        return False
    path = os.path.realpath(file)
    if path == THIS_FILE:
        return False
    if path.startswith((TORCH, *LIBRARIES)):
        return False
    # In the project that this file is from, its folder `helpers` is a library, which launches the user's code.
    folder = os.path.dirname(THIS_FILE)
    is_in_this_project = os.path.basename(folder) == "helpers"
    return not (is_in_this_project and path.startswith(folder + os.sep))


def readers_line() -> Place:
    """The innermost line of the reader's code that led here, or an empty place if none did.

    It is looked for from this function outwards: each frame's ``f_back`` is its caller.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if is_readers(frame.f_code.co_filename):
            return Place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return Place("", 0)


def part_of_torch() -> str:
    """The file of torch that called the running function, such as "nn/parallel/distributed.py"; "" if the script did.

    By this the check distinguishes what a script communicates itself from what DDP or fully_shard communicates for it.
    """
    frame = sys._getframe(1)
    while frame is not None:  # from here outwards, caller by caller
        if is_readers(frame.f_code.co_filename):
            return ""
        file = os.path.realpath(frame.f_code.co_filename)
        # Every collective goes through these two files, whoever calls it.
        is_passed_by_all = file.endswith(("distributed_c10d.py", "c10d_logger.py"))
        if file.startswith(TORCH + os.sep) and not is_passed_by_all:
            return file.removeprefix(TORCH + os.sep)
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself. A rehearsal, whose tensors pretend to be on a GPU, puts its own function here."""
    return tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor in which this rank holds the values, or its part of them."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return plain_tensor(tensor)


def value_of(tensor: torch.Tensor) -> float:
    """The number in a tensor of one element."""
    value: Any = local_part(tensor).tolist()
    return float(value)


# --- what all observers use: checksums --------------------------------------------------------------------------------
# Two ranks have equal tensors, batches, datasets or random states if the checksums are equal. Nothing here keeps state.

CHUNK = 2**23  # bytes of a tensor that are summed at once
# How many rows of a tensor are summed to distinguish one dataset from another:
ROWS_OF_DATASET = 256


@torch.no_grad()
def checksum_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit checksum of a tensor's bytes, as an int64 tensor on its device, so that nothing waits for a GPU.

    The k-th word of 8 bytes, from 0, is multiplied by the odd number 2 k + 1, so that words in another order give
    another sum. A tensor whose bytes cannot be read, such as a sparse one, has the checksum 0.
    """
    data = local_part(tensor).detach()
    has_no_bytes = data.layout != torch.strided or data.is_quantized or data.is_meta
    if has_no_bytes:
        return torch.zeros((), dtype=torch.int64)
    if data.untyped_storage().nbytes() == 0:  # the tensor is empty, or fully_shard has freed it
        return torch.zeros((), dtype=torch.int64)
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj())
    all_bytes = data.resolve_neg().contiguous().flatten().view(torch.uint8)
    # The sum begins with the number of bytes, so that zeros at the end of a tensor count, too.
    total = torch.full((), all_bytes.numel(), dtype=torch.int64, device=data.device)
    word_size = 8  # bytes
    words_before = 0
    for part in all_bytes.split(CHUNK):  # in parts, because the products take as much memory as the words
        padding = -len(part) % word_size  # bytes, to fill up the last word of the tensor
        words = nn.functional.pad(part, (0, padding)).view(torch.int64)
        first_factor = 2 * words_before + 1
        odd_numbers = torch.arange(first_factor, first_factor + 2 * len(words), 2, device=data.device)
        products = words * odd_numbers  # overflow is intended: torch's integers wrap at 2**64
        total += (products ^ (products >> 32)).sum()  # mixes the upper half of each product into the lower one
        words_before += len(words)
    return total


def checksums(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """The checksum of each tensor as an int, and 0 for None, in the order of the tensors.

    Each copy from a GPU to the host waits for the GPU. So there is one copy for each device: all checksums are computed
    first, and those on the same device are copied together.
    """
    sums = {index: checksum_tensor(tensor) for index, tensor in enumerate(tensors) if tensor is not None}
    numbers = [0] * len(tensors)
    devices = {checksum.device for checksum in sums.values()}
    for device in devices:
        sums_on_device = {index: checksum for index, checksum in sums.items() if checksum.device == device}
        copied = torch.stack(list(sums_on_device.values())).tolist()
        for index, number in zip(sums_on_device, copied, strict=True):
            numbers[index] = number
    return numbers


def combined(numbers: Iterable[int]) -> int:
    """One 64-bit checksum of several, as of all tensors of a batch. It depends on their order."""
    prime = 1_000_003
    total = 0
    for number in numbers:
        total = (total * prime + number) % 2**64
    return total


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a batch or another value of nested lists, tuples, dictionaries and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value) and not isinstance(value, type):  # is_dataclass is true of the class itself as well
        for part in vars(value).values():
            yield from tensors_in(part)


def random_state(device: torch.device) -> int:
    """A checksum of the state from which the device draws its next random numbers. Equal states give equal numbers."""
    if device.type == "cuda":
        return checksums([torch.cuda.get_rng_state(device)])[0]
    return checksums([torch.get_rng_state()])[0]


def random_states(dataset: Any) -> dict[str, int]:
    """Checksums of the states of all random generators that a dataset may use, {a generator's name: the checksum}.

    They are the generators of torch, of Python, of NumPy if the script uses it, and those that the dataset itself has.
    If a state has changed after a sample was loaded, the dataset has drawn random numbers from this generator.
    """
    generators = {"torch": torch.default_generator} | generators_in(dataset)
    sums = checksums([generator.get_state() for generator in generators.values()])
    states = dict(zip(generators, sums, strict=True))
    states["random"] = crc(random.getstate())
    numpy = sys.modules.get("numpy")  # not imported here, because a script without it draws nothing from it
    if numpy is not None:
        # Its state is the algorithm's name, an array of words, and numbers. repr() would shorten the array.
        _, words, *numbers = numpy.random.get_state()
        states["numpy"] = crc((words.tobytes(), numbers))
    return states


def generators_in(dataset: Any) -> dict[str, torch.Generator]:
    """The random generators that a dataset has as attributes, by a name that is the same on all ranks.

    A dataset such as torch's Subset has the dataset of which it is a part as its attribute ``dataset``, and that one's
    generators count too. In the name "1 generator", the 1 says that the generator is an attribute of the inner dataset.
    """
    generators = {}
    depth = 0  # how many datasets contain this one
    while dataset is not None:
        for name, value in attributes_of(dataset).items():
            if isinstance(value, torch.Generator):
                generators[f"{depth} {name}"] = value
        dataset = getattr(dataset, "dataset", None)
        depth += 1
    return generators


def attributes_of(value: Any) -> dict[str, Any]:
    """An object's attributes by their names; empty for one that has slots, or is written in C."""
    return getattr(value, "__dict__", {})


def crc(value: object) -> int:
    """A checksum of a value that Python prints in the same way on each rank."""
    return zlib.crc32(repr(value).encode())


def dataset_checksum(dataset: Any, depth: int = 2) -> int | None:
    """A checksum of a dataset's attributes, which is equal on ranks with equal datasets; None if none can be summed.

    It is needed because ranks whose samplers give equal indices train on the same samples only if their datasets are
    equal. An attribute may be a dataset itself: ``depth`` says how many levels of datasets in datasets are looked into.
    """
    contents = []
    for name, value in sorted(attributes_of(dataset).items()):
        summary = summary_of(value, depth)
        if summary:
            contents.append((name, summary))
    if not contents:
        return None
    return crc((type(dataset).__name__, contents))


def summary_of(value: Any, depth: int) -> tuple[Any, ...]:
    """A short tuple that differs if two ranks have different values of a dataset's attribute; empty if that is unknown.

    It is made for tensors, texts, numbers and lists, and for objects that can be indexed, such as the dataset of which
    this one is a part. Of such objects ``depth`` levels are looked into.
    """
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), beginnings([value]))
    if isinstance(value, (str, int, float)):
        return (value,)
    if isinstance(value, (list, tuple, range)) and len(value) > 0:
        # The length and the two ends are enough to distinguish a list of a million file names from another.
        ends = [item for item in (value[0], value[-1]) if isinstance(item, (str, int, float, tuple))]
        tensors = [item for item in value if isinstance(item, torch.Tensor)]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        return (len(value), ends, shapes, beginnings(tensors))
    is_object_with_items = hasattr(value, "__getitem__") and hasattr(value, "__dict__")
    if is_object_with_items and depth > 0:
        return (dataset_checksum(value, depth - 1),)
    return ()


def beginnings(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Checksums of the first rows of tensors, because all rows of a dataset may be many gigabytes."""
    first_rows = []
    for tensor in tensors:
        if tensor.dim() > 0:
            tensor = tensor[:ROWS_OF_DATASET]
        first_rows.append(tensor)
    return checksums(first_rows)


# --- what all observers use: replaced functions of torch --------------------------------------------------------------
# Patches has the list of what was replaced, and restores it at the end. The limits below hold for all observers.

# A tensor of at most so many elements is taken for a metric, unless a parameter has the same size.
LARGEST_METRIC = 16
LARGEST_OBJECT = 4096  # bytes of a pickled Python object that is taken for metrics, and not for a model's state
# With fewer samples an order, or a number that a script adds up, may be equal to another one by chance:
FEWEST_SAMPLES = 8
# Likewise, how many numbers of a batch may be equal to those of another batch by chance:
FEWEST_ELEMENTS = 32
# Notes of the first batches, calls and failures are enough for a comparison, and must not grow with the training:
MOST_BATCHES = 32  # in each epoch
MOST_DROPOUTS = 64
MOST_EVALUATIONS = 8  # of each model
MOST_FAILURES = 20
MOST_ADDRESSES = 100_000  # of tensors that are sent between two steps; a script may never make a step


@dataclass(frozen=True)
class ReplacedFunction:
    """A function of a module, and what takes its place while the check runs."""

    original: Any
    replacement: Any


class Patches:
    """Functions and methods of torch that are replaced while the check runs. ``remove`` restores them.

    torch has no hooks for most of what has to be noted. So the observers replace what a script calls: ``before`` and
    ``after`` add a hook, a function that notes something, and ``around`` lets an observer's method take the call over.
    A hook that fails must not end the training: its traceback is noted in the record instead.
    """

    def __init__(self, record: Record) -> None:
        """Nothing is replaced yet. The check observes the process and the thread in which this is called."""
        self.record = record  # gets the tracebacks of hooks that fail
        self.process = os.getpid()
        self.thread = threading.get_ident()
        self.is_in_hook = False
        self.undo: list[Callable[[], None]] = []  # functions that restore what was replaced, the latest last
        self.functions: dict[int, ReplacedFunction] = {}  # by the id of the original

    def is_on(self) -> bool:
        """Whether a call is noted: the script's own, in the process and the thread that train.

        A DataLoader's workers are forks of the process, and nobody would read their notes. What a hook calls itself is
        not noted either. Nothing is after ``remove``, although other modules may still have a replacement.
        """
        is_training = os.getpid() == self.process and threading.get_ident() == self.thread
        return is_training and not self.is_in_hook and bool(self.undo)

    def run(self, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of an observer, and keep its errors from the training; return its result, or None after one.

        The traceback of an error goes into the record. What the function itself calls is not observed.
        """
        self.is_in_hook = True
        try:
            return hook(*args, **kwargs)
        except Exception:
            if len(self.record.failures) < MOST_FAILURES:
                self.record.failures.append(traceback.format_exc())
            return None
        finally:
            self.is_in_hook = False

    def before(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        """From now on, call ``hook`` before each call of the function ``owner.name``, with the same arguments.

        The owner is a class or a module of torch.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def call_hook_first(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # torch.compile would compile the hook, too
                return original(*args, **kwargs)
            if self.is_on():
                self.run(hook, *args, **kwargs)
            return original(*args, **kwargs)

        self.replace(owner, name, call_hook_first)

    def after(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        """From now on, call ``hook`` after each call of the function ``owner.name``, with its result and its arguments.

        The owner is a class or a module of torch.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def call_hook_afterwards(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if torch.compiler.is_compiling():  # torch.compile would compile the hook, too
                return result
            if self.is_on():
                self.run(hook, result, *args, **kwargs)
            return result

        self.replace(owner, name, call_hook_afterwards)

    def around(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """From now on, call ``method(original, *args, **kwargs)`` in place of each call of the function ``owner.name``.

        ``original`` is the function itself, and ``args`` and ``kwargs`` are the arguments of the call. The method has
        something to do before and after the function, so it calls the function itself, and returns its result.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def call_method(*args: Any, **kwargs: Any) -> Any:
            if self.is_on():
                return method(original, *args, **kwargs)
            return original(*args, **kwargs)

        self.replace(owner, name, call_method)

    def replace(self, owner: Any, name: str, call: Any) -> None:
        """Put a function in the place of ``owner.name``, until ``remove``. The owner is a class or a module."""
        original = getattr(owner, name)
        is_class = isinstance(owner, type)
        is_inherited = is_class and name not in vars(owner)
        setattr(owner, name, call)
        if is_inherited:  # without its own attribute, the class has its parent's again
            self.undo.append(functools.partial(delattr, owner, name))
        else:
            self.undo.append(functools.partial(setattr, owner, name, original))
        if not is_class:
            self.functions[id(original)] = ReplacedFunction(original, call)

    def replace_copies(self) -> None:
        """Replace the functions in all modules that have them by another name, as after ``from torch.x import f``.

        Such an import copies the reference to the function, so ``f`` stays the original there. (Methods are looked up
        in their class at each call, and need nothing.)
        """
        for module in list(sys.modules.values()):
            for name, value in list(attributes_of(module).items()):
                replaced = self.functions.get(id(value))
                if replaced is not None and value is replaced.original:
                    setattr(module, name, replaced.replacement)
                    self.undo.append(functools.partial(setattr, module, name, value))

    def remove(self) -> None:
        """Restore all that was replaced, the latest first."""
        while self.undo:
            restore = self.undo.pop()
            restore()


# --- observing loaders ------------------------------------------------------------------------------------------------
# Which rank gets which samples, in which order, with which random numbers. The observer keeps which epochs run, and
# whether the latest batch was trained on.


class LoaderObserver:
    """Notes which indices each DataLoader gives out, and whether its batches are trained on or evaluated.

    An epoch here is one loop over a loader: it begins when ``iter(loader)`` makes an iterator, and ends when this one
    has no batch left. Several may run at once, so what is known of one is kept by its iterator.
    """

    def __init__(self, record: Record, patches: Patches) -> None:
        """Have the methods below called by torch's loaders. ``record`` gets what they note, and the findings."""
        self.record = record
        self.patches = patches
        self.loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # {loader: its number}
        self.next_numbers = itertools.count()  # a loader that is gone keeps its number
        # By the iterator of a loader:
        self.epochs: weakref.WeakKeyDictionary[Any, Epoch] = weakref.WeakKeyDictionary()
        self.prefetched: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()  # indices, as in Epoch
        self.streams: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()  # checksums of batches
        self.noise = 0  # which random states loading the latest batch changed, as in Epoch
        self.waiting_epoch: Epoch | None = None  # the epoch of the latest batch, until a model is called
        self.training_epoch: Epoch | None = None  # the epoch of the batch that was trained on last
        self.padded_evaluation: Epoch | None = None  # an evaluation with repeated samples that has just ended
        iterator_class = dataloader_module._BaseDataLoaderIter
        patches.after(DataLoader, "__iter__", self.begin_epoch)
        patches.before(iterator_class, "_reset", self.forget_epoch)
        patches.after(iterator_class, "_next_index", self.note_indices)
        patches.around(iterator_class, "__next__", self.next_batch)
        patches.around(_MapDatasetFetcher, "fetch", self.fetch)
        patches.after(dist, "all_reduce", self.find_padding)
        patches.after(dist, "reduce", self.find_padding)

    def next_batch(self, original: Callable[..., Any], iterator: Any) -> Any:
        """Get the next batch for the training loop, and note it; after the last one, note that the epoch has ended.

        This is called in the place of ``next(iterator)``, and ``original`` is torch's method for it, which raises
        StopIteration after the last batch.
        """
        try:
            batch = original(iterator)
        except StopIteration:
            self.patches.run(self.end_epoch, iterator)
            raise
        self.patches.run(self.note_batch, iterator, batch)
        return batch

    def fetch(self, original: Callable[..., Any], fetcher: Any, indices: Any) -> Any:
        """Load the samples of a batch, and note from which random states they drew.

        This is called in the place of ``fetcher.fetch(indices)``, and ``original`` is torch's method for it. A loader
        with workers loads in other processes, of which nothing is seen here.
        """
        before = self.patches.run(random_states, fetcher.dataset) or {}  # run returns None if the function has failed
        batch = original(fetcher, indices)
        self.patches.run(self.note_noise, before, fetcher.dataset)
        return batch

    def begin_epoch(self, iterator: Any, loader: Any) -> None:
        """After ``iter(loader)`` has made an iterator: begin the record of an epoch, with what its loader is like.

        The dataset and the sampler decide whether the ranks should get different samples, and whether the next epoch
        should have another order.
        """
        if loader not in self.loaders:
            self.loaders[loader] = next(self.next_numbers)
        is_stream = isinstance(loader.dataset, IterableDataset)
        samples = 0
        if not is_stream and hasattr(loader.dataset, "__len__"):
            samples = len(loader.dataset)
        sampler = sampler_of(loader)
        epoch = Epoch(
            loader=self.loaders[loader],
            place=readers_line(),
            dataset=dataset_checksum(loader.dataset),
            samples=samples,
            sampler=type(sampler).__name__,
            divided=isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1,
            shuffled=bool(getattr(sampler, "shuffle", False)),
            sampler_epoch=getattr(sampler, "epoch", -1),
            padded_length=padded_length(sampler, samples),
            # A loader with workers asks for the first indices before iter(loader) returns, and so before this.
            indices=self.prefetched.pop(iterator, []),
        )
        self.epochs[iterator] = epoch
        self.record.epochs.append(epoch)
        if is_stream and loader.num_workers > 1:
            self.streams[iterator] = []

    def forget_epoch(self, iterator: Any, *args: Any, **kwargs: Any) -> None:
        """Before an iterator begins anew, as with persistent workers: its next batches are those of another epoch."""
        self.epochs.pop(iterator, None)

    def note_indices(self, indices: Any, iterator: Any) -> None:
        """After the sampler gave the indices of a batch: keep a checksum of them.

        By these checksums the ranks' samples, and the orders of two epochs, are compared at the end.
        """
        if indices is None:  # the dataset is a stream, which has no indices
            return
        epoch = self.epochs.get(iterator)
        if epoch is None:  # workers load ahead of ``begin_epoch``, which takes over this list later
            checksums_of_epoch = self.prefetched.setdefault(iterator, [])
        else:
            checksums_of_epoch = epoch.indices
        if len(checksums_of_epoch) < MOST_BATCHES:
            checksums_of_epoch.append(crc(indices))

    def note_noise(self, before: dict[str, int], dataset: Any) -> None:
        """After a batch was loaded: note from which random states it drew, which have changed since ``before``."""
        after = random_states(dataset)
        changed = [name for name in before if after.get(name) != before[name]]
        self.noise = combined(before[name] for name in changed)

    def note_batch(self, iterator: Any, batch: Any) -> None:
        """After the training loop got a batch: note its random states, and compare what workers of a stream yield.

        Whether the batch is trained on or evaluated shows only when a model is called, so its epoch waits for that.
        """
        epoch = self.epochs.get(iterator)
        self.waiting_epoch = epoch
        if epoch is not None:
            if len(epoch.noise) < MOST_BATCHES:
                epoch.noise.append(self.noise)
            if iterator in self.streams:
                self.check_stream(iterator, batch, epoch)
        self.noise = 0

    def check_stream(self, iterator: Any, batch: Any, epoch: Epoch) -> None:
        """Find workers that each yield the whole stream, so that every sample is trained on several times.

        A loader takes one batch from each worker in turn. If each worker yields the whole stream, all batches of such a
        round are equal. Three rounds have to differ from each other, because a stream of equal batches is no mistake.
        """
        workers = iterator._num_workers
        rounds = 3
        batches = self.streams[iterator]  # a checksum of each batch so far
        batches.append(combined(checksums(list(tensors_in(batch)))))
        if len(batches) < rounds * workers:
            return
        del self.streams[iterator]  # nothing more is to be seen in this epoch
        starts_of_rounds = range(0, len(batches), workers)
        each_round_is_equal = all(equal(batches[start : start + workers]) for start in starts_of_rounds)
        rounds_differ = len(set(batches)) == rounds
        if each_round_is_equal and rounds_differ:
            sentence = f"All {workers} workers of this loader yield the same batches, one after the other."
            self.record.add_finding("stream_repeated", epoch.place, sentence)

    def end_epoch(self, iterator: Any) -> None:
        """At the end of a loop over a loader: remember it if it was an evaluation that got repeated samples.

        ``find_padding`` then sees whether its results are added up with the repeated samples.
        """
        epoch = self.epochs.get(iterator)
        if epoch is None:
            return
        is_evaluation = epoch.evaluated > 0 and epoch.steps == 0
        if is_evaluation and epoch.padded_length >= FEWEST_SAMPLES:
            self.padded_evaluation = epoch

    def model_called(self, model: str, with_gradients: bool) -> None:
        """At the first call of a model after a batch was loaded: note whether the batch is trained on or evaluated.

        ``model`` is the model's name in the record. With gradients, the batch is taken to be trained on.
        """
        epoch = self.waiting_epoch
        if epoch is None:  # the model was not called with a new batch
            return
        if with_gradients:
            self.training_epoch = epoch
            self.padded_evaluation = None
            if model not in epoch.models:
                epoch.models.append(model)
        else:
            epoch.evaluated += 1
        self.waiting_epoch = None

    def optimizer_steps(self) -> None:
        """Before a step of an optimizer: count it for the epoch whose batch it was trained on."""
        if self.training_epoch is not None:
            self.training_epoch.steps += 1

    def find_padding(self, result: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        """After an all-reduce or a reduce: find an evaluation that counts samples twice.

        A DistributedSampler repeats some samples, so that all ranks get equally many. The evaluation certainly counts
        these too if the sum over all ranks, ``tensor``, is the number of samples with the repeated ones: for example 12
        on 4 ranks for a dataset of 10. ``result`` is what the collective returned.
        """
        epoch = self.padded_evaluation
        if epoch is None:  # no evaluation with repeated samples has just ended
            return
        if not isinstance(tensor, torch.Tensor) or tensor.numel() > LARGEST_METRIC:
            return
        if result is not None:  # the Work of an asynchronous collective, which has not yet filled the tensor
            return
        sums_over_ranks = local_part(tensor).flatten().tolist()
        if epoch.padded_length in sums_over_ranks:
            repeated = epoch.padded_length - epoch.samples
            sentence = (
                f"The evaluation counts {epoch.padded_length} samples of {epoch.samples}: the DistributedSampler "
                f"of the loop in line {epoch.place.line} gives {repeated} of them twice."
            )
            self.record.add_finding("counted_twice", readers_line(), sentence)
            self.padded_evaluation = None


def sampler_of(loader: Any) -> Any:
    """The sampler that decides the order of a DataLoader's samples, or None.

    A loader that makes batches has it inside its batch sampler. One that the script itself has written may have none.
    """
    if loader.batch_sampler is None:
        return loader.sampler
    return getattr(loader.batch_sampler, "sampler", None)


def padded_length(sampler: Any, samples: int) -> int:
    """How many samples all ranks together get, with those that the sampler repeats; 0 if it repeats none.

    A DistributedSampler repeats some samples if their number cannot be divided by the number of ranks: of 10
    ``samples``, 4 ranks get 12.
    """
    if not isinstance(sampler, DistributedSampler):
        return 0
    if sampler.drop_last:  # it leaves out samples instead
        return 0
    if sampler.total_size == samples:
        return 0
    return sampler.total_size


# --- observing scalers, clipping and schedulers -----------------------------------------------------------------------
# In which order they and the optimizers are called. The observer keeps the calls since the last step of an optimizer.


@dataclass(frozen=True)
class Clip:
    """A call of clip_grad_norm_ or clip_grad_value_ that has changed gradients."""

    parameters: set[int]  # the ids of the parameters whose gradients are clipped
    place: Place


@dataclass(frozen=True)
class ObservedScheduler:
    """A learning-rate scheduler, and in which order it and its optimizer step.

    The scheduler should step after the optimizer: otherwise the first learning rate is never used.
    """

    scheduler: Any
    first_step: Place
    order: list[str]  # "scheduler" and "optimizer"; begins with "later" if what came before is not known


class ScalerObserver:
    """Notes in which order a GradScaler, clipping, optimizers and schedulers are called.

    A GradScaler multiplies the loss, and with it the gradients, by a scale, and divides them by it before the step.
    Gradients that are clipped, or applied, before they are divided are many times too large.
    """

    def __init__(self, record: Record, patches: Patches) -> None:
        """Have the methods below called where scalers, clipping and schedulers are used. ``record`` gets findings."""
        self.record = record
        self.patches = patches
        # Scalers by their ids:
        self.scalers: dict[int, Any] = {}  # those that scaled a loss
        self.stepped_scalers: set[int] = set()
        self.unscaled_by_hand: set[int] = set()  # those whose scale the script reads
        self.direct_steps: dict[int, Place] = {}  # where an optimizer steps by itself with gradients of this scale
        self.clips: list[Clip] = []  # since the last step
        self.is_in_scaler_step = False  # a scaler's step calls the optimizer's
        self.stepped_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.schedulers: dict[int, ObservedScheduler] = {}  # by the scheduler's id
        self.scheduler_depth = 0  # a SequentialLR calls the step of other schedulers within its own
        patches.before(GradScaler, "scale", self.scale)
        patches.before(GradScaler, "get_scale", self.read_scale)
        patches.around(GradScaler, "step", self.step_scaler)
        patches.around(nn.utils, "clip_grad_norm_", self.clip)
        patches.around(nn.utils, "clip_grad_value_", self.clip)
        for scheduler_class in vars(lr_scheduler).values():
            if isinstance(scheduler_class, type) and "step" in vars(scheduler_class):
                patches.around(scheduler_class, "step", self.step_scheduler)

    def scale(self, scaler: Any, outputs: Any) -> None:
        """Before ``scaler.scale(loss)``: note a scaler that is in use."""
        if scaler.is_enabled():
            self.scalers[id(scaler)] = scaler

    def read_scale(self, scaler: Any) -> None:
        """Before ``scaler.get_scale()``: if the script's own code asks for the scale, it may divide gradients by it."""
        is_called_by_script = part_of_torch() == ""
        if is_called_by_script:
            self.unscaled_by_hand.add(id(scaler))

    def is_scaling(self, scaler: Any) -> bool:
        """Whether a scaler has certainly multiplied the gradients, and only its own ``unscale_`` divides them again."""
        if id(scaler) not in self.scalers:  # it has scaled no loss
            return False
        if id(scaler) in self.unscaled_by_hand:
            return False
        if scaler._scale is None:
            return False
        return value_of(scaler._scale) != 1.0

    def is_unscaled(self, scaler: Any, optimizer: Any) -> bool:
        """Whether ``scaler.unscale_(optimizer)`` was called since the last step.

        A scaler keeps a stage for each optimizer: READY, until the optimizer's gradients are divided by the scale.
        """
        state = scaler._per_optimizer_states.get(id(optimizer))
        return state is not None and state["stage"].name != "READY"

    def clip(self, original: Callable[..., Any], parameters: Any, limit: Any, *args: Any, **kwargs: Any) -> Any:
        """Clip gradients, and note which were clipped. Returns the gradients' norm or None, as torch does.

        This is called in the place of ``original``, which is torch's ``clip_grad_norm_`` or ``clip_grad_value_``.
        """
        if not isinstance(parameters, torch.Tensor):
            parameters = list(parameters)  # they are needed twice, and may be a generator
        norm = original(parameters, limit, *args, **kwargs)
        self.patches.run(self.note_clip, parameters, limit, norm)
        return norm

    def note_clip(self, parameters: Any, limit: Any, norm: Any) -> None:
        """After ``clip_grad_norm_(parameters, limit)``, which returned ``norm``: note whose gradients were clipped.

        Nothing was clipped if the norm was below the limit. ``norm`` is None after ``clip_grad_value_``.
        """
        if float(limit) == float("inf"):  # scripts use this to measure the norm
            return
        # The value of a DTensor's norm is not read, because that would take a collective.
        if isinstance(norm, torch.Tensor) and not isinstance(norm, DTensor):
            if value_of(norm) <= float(limit):
                return
        clipped = {id(parameter) for parameter in tensors_in(parameters)}
        self.clips.append(Clip(clipped, readers_line()))

    def step_scaler(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Let a scaler step its optimizer, and look before it at what was clipped.

        This is called in the place of ``scaler.step(optimizer)``, and ``original`` is torch's method for it. While it
        runs, ``is_in_scaler_step`` shows ``optimizer_steps`` below that the script does not step the optimizer itself.
        """
        self.patches.run(self.find_scaled_clips, scaler, optimizer)
        self.is_in_scaler_step = True
        try:
            return original(scaler, optimizer, *args, **kwargs)
        finally:
            self.is_in_scaler_step = False

    def find_scaled_clips(self, scaler: Any, optimizer: Any) -> None:
        """Before ``scaler.step(optimizer)``: find gradients that were clipped while they were multiplied by the scale.

        The limit of the clipping is meant for the gradients as they are, and not for ones that are 65,536 times as
        large.
        """
        self.stepped_scalers.add(id(scaler))
        self.note_order(optimizer)
        clips_since_last_step = self.clips
        self.clips = []
        gradients_are_scaled = self.is_scaling(scaler) and not self.is_unscaled(scaler, optimizer)
        if not gradients_are_scaled:
            return
        parameters_of_step = {id(parameter) for parameter in parameters_of(optimizer)}
        for clip in clips_since_last_step:
            if not clip.parameters.isdisjoint(parameters_of_step):
                scale = value_of(scaler._scale)
                sentence = f"The gradients are clipped while they are still multiplied by the loss scale, {scale:g}."
                self.record.add_finding("clipped_while_scaled", clip.place, sentence)

    def optimizer_steps(self, optimizer: Any) -> None:
        """Before an optimizer's step: if no scaler calls it, note whether its gradients are scaled.

        It becomes a finding only in ``close``, because the script may yet show that it divides them itself.
        """
        if self.is_in_scaler_step:
            return
        self.clips = []
        self.note_order(optimizer)
        for scaler in self.scalers.values():
            if self.is_scaling(scaler) and not self.is_unscaled(scaler, optimizer):
                self.direct_steps[id(scaler)] = readers_line()

    def step_scheduler(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Step a learning-rate scheduler, and note the step if the script itself makes it.

        This is called in the place of ``scheduler.step()``, and ``original`` is the method of the scheduler's class. A
        scheduler may be made of others, whose ``step`` it calls within its own: these calls, inside another one as
        ``scheduler_depth`` shows, are not noted.
        """
        if self.scheduler_depth == 0:
            self.patches.run(self.scheduler_steps, scheduler)
        self.scheduler_depth += 1
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            self.scheduler_depth -= 1

    def scheduler_steps(self, scheduler: Any) -> None:
        """Before a scheduler's step: add it to the order in which this scheduler and its optimizer step.

        An order such as ["scheduler", "optimizer", …] shows a mistake only if it begins with the first step of the
        training. Otherwise its first entry is "later".
        """
        steps_made = getattr(scheduler, "_step_count", 0)
        if steps_made == 0:  # the scheduler is being built, or it counts no steps
            return
        if id(scheduler) in self.schedulers:
            self.schedulers[id(scheduler)].order.append("scheduler")
            return
        optimizer = scheduler.optimizer
        optimizer_has_stepped = optimizer in self.stepped_optimizers or getattr(optimizer, "_opt_called", False)
        # A scheduler makes its first step by itself when it is built, and is then at epoch 0.
        scheduler_is_new = steps_made == 1 and scheduler.last_epoch == 0
        if scheduler_is_new and not optimizer_has_stepped:
            order = ["scheduler"]
        else:
            order = ["later"]
        self.schedulers[id(scheduler)] = ObservedScheduler(scheduler, readers_line(), order)

    def note_order(self, optimizer: Any) -> None:
        """Before an optimizer's step: note it for each scheduler that changes its learning rates."""
        self.stepped_optimizers.add(optimizer)
        for observed in self.schedulers.values():
            if observed.scheduler.optimizer is optimizer:
                observed.order.append("optimizer")

    def close(self) -> None:
        """At the end of the observation: add the findings that are certain only now.

        If an optimizer steps by itself after a scaler scaled the loss, this is a mistake only if the scaler never made
        a step, and if the script never asked for the scale, by which it could have divided the gradients itself.
        """
        for scaler_id, place in self.direct_steps.items():
            if scaler_id not in self.stepped_scalers and scaler_id not in self.unscaled_by_hand:
                sentence = "optimizer.step() applies gradients that are still multiplied by the loss scale."
                self.record.add_finding("wrong_order", place, sentence)
        wrong_order = ["scheduler", "optimizer"] * 3  # three times, so that it is certain
        for observed in self.schedulers.values():
            begin_of_order = observed.order[: len(wrong_order)]
            if begin_of_order == wrong_order:
                sentence = "The scheduler steps before the optimizer, so the first learning rate is never used."
                self.record.add_finding("wrong_order", observed.first_step, sentence)


# --- observing what is loaded, tied and saved -------------------------------------------------------------------------
# The observer keeps which attributes of modules hold one parameter, and the keys with which modules were loaded.


@dataclass(frozen=True)
class Attribute:
    """An attribute of a module that holds a parameter, or has held one."""

    owner: weakref.ref  # to the module, so that the check keeps no model alive
    name: str

    def parameter(self) -> Any:
        """The parameter that the attribute holds now, or None."""
        module = self.owner()
        if module is None:
            return None
        return module._parameters.get(self.name)


@dataclass(frozen=True)
class Load:
    """A call of ``load_state_dict(strict=False)``."""

    has_match: bool  # whether the module has any of the keys that it was given
    place: Place
    example: str  # names a key that the module has, and one that it was given


class StateObserver:
    """Notes loads that fill nothing, ties between weights that break, and files that ranks write.

    Weights are tied if several attributes of modules hold one parameter. A tie is the list of these attributes; it is
    kept when the attributes get other parameters, because they should again be one.
    """

    def __init__(self, record: Record, patches: Patches, steps_made: Callable[[], int]) -> None:
        """Have the methods below called where a script registers, loads and saves state.

        ``record`` gets what they note, and the findings. ``steps_made`` returns how many optimizer steps this rank has
        made.
        """
        self.record = record
        self.steps_made = steps_made
        # By the parameter's id, because torch.utils.swap_tensors refuses a parameter that has a weak reference.
        self.attributes: dict[int, list[Attribute]] = {}
        self.ties: list[list[Attribute]] = []
        self.is_loading = False  # whether a load_state_dict runs
        self.loads: dict[int, list[Load]] = {}  # by a checksum of the keys that were given
        patches.before(nn.Module, "register_parameter", self.register)
        patches.before(nn.Module, "load_state_dict", self.load)
        patches.after(nn.Module, "load_state_dict", self.loaded)
        patches.after(dcp, "load", self.load_distributed)
        patches.before(torch, "save", self.save)

    def note_existing(self, modules: Iterable[nn.Module]) -> None:
        """Note the parameters of modules that were built before the observation began."""
        for module in modules:
            for name, parameter in module._parameters.items():
                self.register(module, name, parameter)

    def register(self, module: nn.Module, name: str, parameter: Any) -> None:
        """Before ``module.name = parameter``: note which attributes of modules hold this parameter.

        If it is the second attribute that holds the same parameter, the weights are tied, and the list of the two is
        added to ``ties``. A third attribute is added to the same list.
        """
        if not self.is_loading:
            self.forget_ties_of(module, name)  # the script itself assigns a parameter, so it decides what is tied
        if not isinstance(parameter, nn.Parameter):
            return
        holders = self.attributes.get(id(parameter), [])
        if not any(attribute.parameter() is parameter for attribute in holders):
            holders = []  # these attributes held an earlier parameter, which is gone and had the same id
        holders.append(Attribute(owner=weakref.ref(module), name=name))
        self.attributes[id(parameter)] = holders
        is_new_tie = len(holders) == 2
        if is_new_tie:
            self.ties.append(holders)

    def forget_ties_of(self, module: nn.Module, name: str) -> None:
        """Take the attribute ``module.name`` out of the ties that it is in."""
        for tie in self.ties:
            others = []
            for attribute in tie:
                is_this_one = attribute.owner() is module and attribute.name == name
                if not is_this_one:
                    others.append(attribute)
            tie[:] = others  # in place, because ``attributes`` has the same list

    def load(self, module: nn.Module, state: Any, strict: bool = True, *args: Any, **kwargs: Any) -> None:
        """Before ``module.load_state_dict(state, strict=False)``: note whether any key of ``state`` is in the module.

        If none is, that may be a mistake. It becomes a finding only at the end, in ``close``, because a script may try
        one ``state`` on several modules in turn. With strict=True torch itself raises an error.
        """
        self.is_loading = True
        if strict:
            return
        # The module is not asked for its state_dict(), because hooks of it may communicate.
        own_keys = {name for name, _ in itertools.chain(module.named_parameters(), module.named_buffers())}
        if not own_keys or not state:
            return
        given_keys = sorted(state)
        load = Load(
            has_match=not own_keys.isdisjoint(given_keys),
            place=readers_line(),
            example=f"it has {min(own_keys)}, and was given {given_keys[0]}",
        )
        self.loads.setdefault(crc(given_keys), []).append(load)

    def loaded(self, result: Any, *args: Any, **kwargs: Any) -> None:
        """After ``load_state_dict``: what registers a parameter from now on is the script again."""
        self.is_loading = False

    def load_distributed(self, result: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        """After ``dcp.load(state, checkpoint_id=path)``: find state that was not loaded, although no error was raised.

        dcp.load fills the tensors that ``state`` has. What else the checkpoint holds is left out without a word.
        """
        path = kwargs.get("checkpoint_id")
        if path is None or not os.path.isdir(path):
            return
        metadata = dcp.FileSystemReader(path).read_metadata()
        saved_keys = set(metadata.state_dict_metadata)  # such as "model.weight"
        self.find_empty_optimizers(state, saved_keys)

        keys_to_load = {key for key, value in flat(state) if isinstance(value, torch.Tensor)}
        # If the checkpoint lacks a key, dcp.load raises an error, unless a planner allows it.
        may_lack_keys = getattr(kwargs.get("planner"), "allow_partial_load", False)
        if may_lack_keys and keys_to_load and keys_to_load.isdisjoint(saved_keys):
            sentence = (
                f"Not one tensor was loaded: {min(keys_to_load)} was asked for, "
                f"and the checkpoint has {min(saved_keys)}."
            )
            self.record.add_finding("nothing_restored", readers_line(), sentence)

    def find_empty_optimizers(self, state: dict[str, Any], saved_keys: set[str]) -> None:
        """Find an optimizer whose moments a checkpoint holds, and whose state dictionary had no place for them.

        ``state`` is what the checkpoint was loaded into: {"model": …, "optimizer": optimizer.state_dict()}.
        ``saved_keys`` are the names of all that the checkpoint holds, such as "optimizer.state.weight.exp_avg".
        """
        for name, part in state.items():
            is_optimizer = isinstance(part, dict) and "param_groups" in part
            if not is_optimizer:
                continue
            has_place_for_moments = bool(part.get("state"))
            if has_place_for_moments:
                continue
            if any(key.startswith(f"{name}.state.") for key in saved_keys):
                sentence = (
                    f"The checkpoint holds the optimizer's moments, and {name!r} has no place for them: "
                    "the state of an optimizer that has made no step is empty."
                )
                self.record.add_finding("nothing_restored", readers_line(), sentence)

    def save(self, value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        """Before ``torch.save(value, file)``: note the first time that a path is written to.

        The rules then see whether several ranks write one file, and whether it is rank 0 that saves the model.
        """
        if not isinstance(file, (str, os.PathLike)):  # it may be an open file, or memory
            return
        if os.fspath(file).startswith("/dev/"):  # such as /dev/null, which all ranks may write to
            return
        path = os.path.realpath(file)
        save = Save(steps_made=self.steps_made(), place=readers_line())
        self.record.saves.setdefault(path, save)

    def broken_ties(self, model: nn.Module) -> Iterator[str]:
        """Yield the names of weights that once were one parameter, and are several now: "head.weight and wte.weight".

        ``self.ties`` has lists of attributes, such as ``wte.weight`` and ``head.weight``, that held one parameter.
        """
        paths = {module: path for path, module in model.named_modules()}  # the model's own path is ""
        for tie in self.ties:
            names: dict[nn.Parameter, str] = {}  # for a parameter that several attributes hold, the first one's
            for attribute in tie:
                module = attribute.owner()
                parameter = attribute.parameter()
                if parameter is None or module not in paths:  # the attribute is gone, or of another model
                    continue
                full_name = f"{paths[module]}.{attribute.name}".lstrip(".")
                names.setdefault(parameter, full_name)
            if len(names) > 1:
                yield " and ".join(names.values())

    def close(self) -> None:
        """At the end of the observation: find state dictionaries that matched no module.

        A script may try one on several modules in turn, so it is a mistake only if none of them had any of its keys.
        """
        for loads in self.loads.values():
            if not any(load.has_match for load in loads):
                sentence = f"load_state_dict(strict=False) matched no key of the module: {loads[0].example}."
                self.record.add_finding("nothing_loaded", loads[0].place, sentence)


def flat(state: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The (key, value) pairs of nested dictionaries, whose keys are joined with dots, as DCP names them."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# --- observing communication ------------------------------------------------------------------------------------------
# What the script's own code sends, since it may average gradients, weights or metrics itself. The observer keeps from
# where in memory tensors were sent since the last step.


class CommunicationObserver:
    """Notes whether the script's own code sends tensors, large as gradients or small as metrics."""

    # The names of all collectives, as methods of a process group and as functional collectives:
    METHODS = (
        "allreduce allreduce_coalesced broadcast reduce scatter gather gather_single allgather allgather_coalesced "
        "_allgather_base all_gather_single all_gather_single_coalesced allgather_into_tensor_coalesced reduce_scatter "
        "_reduce_scatter_base reduce_scatter_single reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced "
        "alltoall alltoall_base all_to_all_single send recv recv_anysource"
    ).split()
    FUNCTIONAL = (
        "broadcast all_reduce all_gather_single all_gather_single_autograd reduce_scatter_single all_gather_tensor "
        "reduce_scatter_single_autograd all_gather_tensor_autograd reduce_scatter_tensor all_to_all_single "
        "reduce_scatter_tensor_autograd all_reduce_coalesced all_to_all_single_autograd permute_tensor "
        "all_gather_into_tensor_coalesced reduce_scatter_tensor_coalesced"
    ).split()
    # The folders of torch whose collectives are not the script's own, because torch itself averages what it has to:
    # DDP, fully_shard, ZeroRedundancyOptimizer, DTensors, SyncBatchNorm, and checkpoints, which average nothing.
    PARTS_OF_TORCH = (
        "nn/parallel/",
        "nn/modules/",
        "distributed/fsdp/",
        "distributed/_composable/",
        "distributed/checkpoint/",
        "distributed/optim/",
        "distributed/tensor/",
    )

    def __init__(self, record: Record, patches: Patches, sent: Callable[[], None]) -> None:
        """Let ``note`` be called with what any collective sends. ``record`` gets the notes.

        ``sent`` is called after each collective that the script's own code has called.
        """
        self.record = record
        self.sent = sent
        self.addresses: set[int] = set()  # where the tensors that were sent since the last step begin in memory
        for name in self.METHODS:
            if hasattr(dist.ProcessGroup, name):  # not every version has all of them
                patches.before(dist.ProcessGroup, name, self.send)
        functional = sys.modules["torch.distributed._functional_collectives"]
        for name in self.FUNCTIONAL:
            if hasattr(functional, name):
                patches.before(functional, name, self.send_functional)

    def send(self, group: Any, *args: Any, **kwargs: Any) -> None:
        """Before a collective of a process group, which are its methods. Alone in a group, a rank sends nothing."""
        if group.size() > 1:
            self.note(list(tensors_in([args, kwargs])))

    def send_functional(self, *args: Any, **kwargs: Any) -> None:
        """Before a functional collective. It goes past the methods of a process group."""
        self.note(list(tensors_in([args, kwargs])))

    def note(self, tensors: list[torch.Tensor]) -> None:
        """Note which tensors the script itself sends by a collective, and not DDP or another part of torch for it.

        A script that sends large tensors may average gradients or weights itself. What is as small as a metric is noted
        apart from them, by its size.
        """
        if part_of_torch().startswith(self.PARTS_OF_TORCH):
            return
        for tensor in tensors:
            # Functions such as all_gather_object send Python objects as bytes.
            is_small_object = tensor.dtype == torch.uint8 and tensor.numel() < LARGEST_OBJECT
            if tensor.numel() <= LARGEST_METRIC or is_small_object:
                self.record.sent_sizes.add(tensor.numel())
            else:
                self.record.sent_large = True
            if len(self.addresses) < MOST_ADDRESSES:
                self.addresses.add(local_part(tensor).data_ptr())
        self.sent()


# --- observing models, and the whole training -------------------------------------------------------------------------
# TrainingObserver has the other observers, and sees the calls of models, the backward passes and the steps. It keeps
# what was called so far, and by how much calls are nested.

OTHER_LIBRARIES = {"horovod", "deepspeed", "mpi4py", "colossalai", "bagua", "ray"}  # they communicate without torch


@dataclass(eq=False)
class ObservedModel:
    """A module that the training loop calls, and how it was called so far."""

    module: nn.Module
    note: Model
    name: str = ""  # empty until the training uses the module
    calls: Calls = field(default_factory=lambda: Calls(to_average=0, to_broadcast=0, averaged=0))
    waits_for_backward: bool = False  # since a forward whose backward will average the gradients

    def unwrapped(self) -> nn.Module:
        """The module itself, or the one inside it if it is a DistributedDataParallel."""
        if isinstance(self.module, DistributedDataParallel):
            inner: nn.Module = self.module.module
            return inner
        return self.module

    def communicates(self, with_gradients: bool) -> bool:
        """Whether a call now, or the backward pass after it, would make this rank wait for the other ranks.

        ``with_gradients``: whether gradients are recorded, so that a backward pass is to follow.
        """
        if isinstance(self.module, DistributedDataParallel):
            if with_gradients:
                averages: bool = self.module.require_backward_grad_sync  # False in no_sync
                return averages
            broadcasts_buffers: bool = self.module._check_sync_bufs_pre_fwd()
            return broadcasts_buffers
        # fully_shard gathers the weights from all ranks in each call. A model without a wrapper sends nothing.
        return self.note.wrapper == "FSDP"


def note_of_model(module: nn.Module) -> Model:
    """How a model is wrapped, and which ranks average its gradients: DDP's group, or the mesh of fully_shard.

    fully_shard may have been applied to the model or only to modules inside it. Then the first of these counts.
    """
    if isinstance(module, DistributedDataParallel):
        ranks = dist.get_process_group_ranks(module.process_group)
        return Model(wrapper="DDP", data_ranks=tuple(ranks))
    for part in module.modules():
        if isinstance(part, FSDPModule):
            return Model(wrapper="FSDP", data_ranks=mesh_ranks(part))
    return Model(wrapper="", data_ranks=())


class TrainingObserver:
    """Observes the training of one rank for ``steps`` steps of an optimizer; ``record`` has what it saw."""

    def __init__(self, steps: int) -> None:
        """Nothing is observed before ``start``. The observation ends when an optimizer has made ``steps`` steps."""
        self.steps = steps
        self.record = Record()
        self.patches = Patches(self.record)
        self.store: Any = None  # of the process group
        self.models: dict[int, ObservedModel] = {}  # by the module's id
        # {a module inside DDP: a reference to the DistributedDataParallel}
        self.wrapper_of: weakref.WeakKeyDictionary[nn.Module, weakref.ref] = weakref.WeakKeyDictionary()
        self.running_ddp: list[nn.Module] = []  # the DistributedDataParallel modules whose forward runs
        self.call_depth = 0  # how many calls of modules run, each inside the one before
        self.backward_depth = 0  # likewise, of backward passes
        self.random_state = 0  # a checksum of the random state before the current call of a model
        self.has_dropped = False  # whether a dropout drew random numbers in the current call of a model
        self.optimizers: dict[int, ObservedOptimizer] = {}  # by the optimizer's id
        self.built: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()  # where an optimizer was built
        self.stepping: Any = None  # the optimizer whose step runs
        self.evaluation: Evaluation | None = None  # the current one; None while the model is trained
        self.is_finished = False
        self.hooks: list[Any] = []  # torch's handles, by which its hooks are removed

    def start(self, note_existing: bool = True) -> None:
        """Begin to observe the training: replace functions of torch by ones that also note how they are called.

        With ``note_existing``, modules that the script has already built are observed as well.
        """
        patches = self.patches
        self.loaders = LoaderObserver(self.record, patches)
        self.scalers = ScalerObserver(self.record, patches)
        self.states = StateObserver(self.record, patches, steps_made=lambda: len(self.record.steps))
        self.communication = CommunicationObserver(self.record, patches, sent=self.communicated)
        self.wrap_module_calls()
        patches.around(torch.autograd, "backward", self.run_backward)
        patches.around(torch.autograd, "grad", self.run_backward)
        patches.after(Optimizer, "__init__", self.optimizer_built)
        patches.after(DistributedDataParallel, "__init__", self.ddp_built)
        patches.before(torch.Tensor, "item", self.read_number)
        patches.replace_copies()
        if note_existing:
            # type() and not isinstance(), which reads an object's __class__: a lazy object may begin to work then.
            existing = [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]
            patches.run(self.states.note_existing, existing)
            for module in existing:
                if isinstance(module, DistributedDataParallel):
                    patches.run(self.observed, module)
        self.hooks = [
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ]

    def remove_hooks(self) -> None:
        """Remove the hooks of optimizers.

        ``stop`` leaves them, because it may be called by one of them, while torch iterates over its hooks.
        """
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def stop(self) -> None:
        """End the observation, and complete the record. The hooks of optimizers stay until ``remove_hooks``."""
        if self.is_finished:
            return
        self.is_finished = True
        self.patches.remove()
        # These mistakes are certain only now.
        self.patches.run(self.scalers.close)
        self.patches.run(self.states.close)
        self.patches.run(self.find_idle_optimizers)
        self.describe_rank()
        # Only now every finding can be given this rank's number.
        findings = without_repetitions(self.record.findings)
        self.record.findings = [replace(found, ranks=(self.record.rank,)) for found in findings]

        # The training may go on for long, and must not be kept from freeing models and optimizers.
        self.models.clear()
        self.optimizers.clear()
        del self.loaders, self.scalers, self.states, self.communication

    def describe_rank(self) -> None:
        """Note this rank's number, its host and its device, and whether it may communicate without torch."""
        if dist.is_initialized():
            self.see_group()
        elif self.store is None:  # the script has never made a process group
            self.record.rank = int(os.environ.get("RANK", 0))
        self.record.host = socket.gethostname()
        if torch.cuda.is_available():
            self.record.device = torch.cuda.get_device_name()
        else:
            self.record.device = torch.backends.cpu.get_cpu_capability()
        if not OTHER_LIBRARIES.isdisjoint(sys.modules):
            self.record.sent_large = True  # such a library may send gradients, which this check cannot see

    def see_group(self) -> None:
        """Note this rank's number in the process group, and the group's store, through which the notes will go.

        It is called as early as there is a group, because the script may end its group before the check ends.
        """
        self.record.rank = dist.get_rank()
        self.record.world_size = dist.get_world_size()
        self.store = distributed_c10d._get_default_store()

    # --- calls of modules

    def wrap_module_calls(self) -> None:
        """Observe the calls of models, by a replacement of the method with which every module is called."""
        original = nn.Module.__call__

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            """Takes the place of ``original``, nn.Module.__call__, which runs alone if the call is not to be noted."""
            # While a graph is compiled, or a checkpointed part is recomputed in backward, nothing new is called.
            if torch.compiler.is_compiling() or self.backward_depth > 0 or not self.patches.is_on():
                return original(module, *args, **kwargs)
            return self.call_module(original, module, args, kwargs)

        self.patches.replace(nn.Module, "__call__", call)

    def call_module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module, and observe the call if the module is a model, or a dropout inside one.

        This is called in the place of ``module(*args, **kwargs)``, and ``original`` is torch's method for it. A model
        is a module that no other module calls, or DDP, which may be inside another module. A module calls those inside
        it, so these calls are nested, and ``call_depth`` says how deep.
        """
        inner = uncompiled(module)
        is_ddp = isinstance(inner, DistributedDataParallel)
        is_called_by_script = self.call_depth == 0
        self.call_depth += 1
        forward = None  # the record of this call, if it is one to record
        if is_called_by_script or is_ddp:
            forward = self.patches.run(self.before_model, inner, args, kwargs)
        elif self.wrapper_of:
            self.patches.run(self.check_wrapper, module)
        if is_ddp:
            self.running_ddp.append(inner)
        try:
            output = original(module, *args, **kwargs)
            if isinstance(module, nn.modules.dropout._DropoutNd):  # the class of all layers for dropout
                if module.training and module.p > 0:
                    self.patches.run(self.note_dropout, args, output)
            if forward is not None:
                self.patches.run(self.after_model, inner, forward)
            return output
        finally:
            self.call_depth -= 1
            if is_ddp:
                self.running_ddp.pop()

    def observed(self, module: nn.Module) -> ObservedModel | None:
        """What is known of a module as a model, or None for a module without parameters, such as a loss.

        What was known of a module before ``fully_shard`` wrapped it is replaced.
        """
        known = self.models.get(id(module))
        if known is not None:
            was_wrapped_since = isinstance(module, FSDPModule) and not known.note.wrapper
            if not was_wrapped_since:
                return known
        has_parameters = next(module.parameters(), None) is not None
        if not has_parameters:
            return None
        if isinstance(module, DistributedDataParallel):
            for part in module.module.modules():
                self.wrapper_of[part] = weakref.ref(module)  # by which ``check_wrapper`` finds calls that go past DDP
        self.models[id(module)] = ObservedModel(module, note_of_model(module))
        return self.models[id(module)]

    def use(self, model: ObservedModel) -> None:
        """Give the model a name when the training first uses it, such as "DDP Net 1" for the first Net inside DDP.

        By its name a model of one rank is compared with that of another. The name is the same on all ranks that use
        their models in the same order.
        """
        if model.name:
            return
        class_name = type(model.unwrapped()).__name__
        kind = f"{model.note.wrapper} {class_name}".strip()
        earlier = [name for name in self.record.models if name.startswith(f"{kind} ")]
        model.name = f"{kind} {len(earlier) + 1}"
        self.record.models[model.name] = model.note

    def before_model(self, module: nn.Module, args: Any, kwargs: Any) -> Forward | None:
        """Before the training loop calls a module: begin a record of the call, which ``after_model`` completes.

        There is one for each call with gradients, and for the first call of an evaluation. An evaluation begins when a
        model in eval mode is called without gradients, and ends with the next call with gradients. Returns None for
        other calls, and for a module without parameters, such as a loss or a metric.
        """
        self.check_wrapper(module)
        model = self.observed(module)
        if model is None:
            return None
        self.use(model)
        with_gradients = torch.is_grad_enabled()
        self.loaders.model_called(model.name, with_gradients)
        self.count_call(model, with_gradients)
        if with_gradients:
            self.evaluation = None
            return self.begin_forward(model, args, kwargs)
        begins_evaluation = self.evaluation is None and not module.training
        if begins_evaluation:
            return self.begin_forward(model, args, kwargs)
        return None

    def begin_forward(self, model: ObservedModel, args: Any, kwargs: Any) -> Forward:
        """Before ``model(*args, **kwargs)``: begin the record of the call, with its line and checksums of its inputs.

        The random state before the call is kept as well, because a dropout in the call draws its numbers from it.
        """
        inputs = list(tensors_in([args, kwargs]))
        forward = Forward(
            model=model.name,
            place=readers_line(),
            inputs=combined(checksums(inputs)),
            elements=sum(tensor.numel() for tensor in inputs),
        )
        self.has_dropped = False
        device = next(model.module.parameters()).device
        self.random_state = random_state(device)
        return forward

    def after_model(self, module: nn.Module, forward: Forward) -> None:
        """After a call of a model: complete the notes that ``before_model`` has begun, and add them to the record."""
        if not torch.is_grad_enabled():
            self.note_evaluation(module, forward)
            return
        if self.has_dropped:
            forward.noise = self.random_state
        self.record.forwards.append(forward)

    def count_call(self, model: ObservedModel, with_gradients: bool) -> None:
        """Before a call of a model: count it, if the call or its backward pass communicates with the other ranks.

        The counts are compared at the end, because all ranks have to make such calls equally often. ``with_gradients``
        says whether gradients are recorded, so that a backward pass will follow.
        """
        calls = model.calls
        if isinstance(model.module, DistributedDataParallel):
            join: Any = model.module._join_config  # of torch's context Join, in which ranks may make fewer calls
            if join.enable:
                model.note.joins = True

        line = readers_line()
        if not model.communicates(with_gradients):
            is_in_no_sync = with_gradients and model.note.wrapper == "DDP"
            if is_in_no_sync:  # DDP does not average, which is a mistake if this is the last call before a step
                calls.not_synchronized = line
            return

        if with_gradients:
            calls.to_average += 1
            calls.not_synchronized = None
            calls.synchronized = True
            model.waits_for_backward = True
        else:
            calls.to_broadcast += 1
        if line not in calls.places:
            calls.places.append(line)

    def check_wrapper(self, module: nn.Module) -> None:
        """Before a module inside DDP is called with gradients: note the call if it does not come from DDP.

        DDP's own forward prepares the averaging of gradients. So if the script calls ``ddp.module(x)`` in place of
        ``ddp(x)``, nothing is averaged.
        """
        reference = self.wrapper_of.get(module)
        if reference is None:  # the module is not inside DDP
            return
        if not torch.is_grad_enabled():
            return
        ddp = reference()
        if ddp is None or ddp in self.running_ddp:
            return
        calls = self.models[id(ddp)].calls
        if calls.around is None:
            calls.around = readers_line()

    def note_dropout(self, args: Any, output: Any) -> None:
        """After a dropout: note that it drew random numbers and, on tensor-parallel ranks, what it made of its input.

        Tensor-parallel ranks hold the same activation, so each of them has to drop the same units. A DTensor sees to
        that itself, so it is left out. ``args`` are the arguments of the dropout, of which the first is its input.
        """
        self.has_dropped = True
        ranks = self.tensor_parallel_ranks
        if not ranks:
            return
        if len(self.record.dropouts) >= MOST_DROPOUTS:
            return
        if not torch.is_grad_enabled():  # in an evaluation
            return
        activation = args[0]
        if isinstance(activation, DTensor) or isinstance(output, DTensor):
            return
        before, after = checksums([activation, output])
        self.record.dropouts.append(Dropout(readers_line(), ranks, before, after))

    @functools.cached_property
    def tensor_parallel_ranks(self) -> tuple[int, ...]:
        """The ranks among which a model's matrices are divided for tensor parallelism; empty if they are not.

        Tensor parallelism usually has the last dimension of a mesh. But fully_shard makes DTensors, too, and divides
        them among ranks that have different data. So the ranks along the last dimension are returned unless they are
        such ranks.
        """
        for model in self.models.values():
            for parameter in model.module.parameters():
                if not isinstance(parameter, DTensor):
                    continue
                mesh = parameter.device_mesh
                last_dimension = mesh.get_group(mesh.ndim - 1)
                ranks = tuple(dist.get_process_group_ranks(last_dimension))
                divided_by_fully_shard = set(ranks) <= set(model.note.data_ranks)
                if not divided_by_fully_shard:
                    return ranks
        return ()

    def note_evaluation(self, module: nn.Module, forward: Forward) -> None:
        """After the first call of an evaluation: note on what data, and with which batch statistics, the model runs.

        If ranks have different statistics, the result depends on which rank evaluates which data. So evaluations of a
        model that has statistics are recorded, but only the first few. In any case ``self.evaluation`` is set, which
        shows that an evaluation is going on.
        """
        statistics = batch_statistics(module)
        earlier = [evaluation for evaluation in self.record.evaluations if evaluation.model == forward.model]
        is_recorded = bool(statistics) and len(earlier) < MOST_EVALUATIONS
        parameters = list(module.parameters())
        is_sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        checksum_of_weights = 0
        if is_recorded and not is_sharded:
            checksum_of_weights = combined(checksums(parameters))
        checksums_of_statistics = checksums(list(statistics.values()))
        self.evaluation = Evaluation(
            model=forward.model,
            number=len(earlier),
            place=forward.place,
            inputs=forward.inputs,
            weights=checksum_of_weights,
            buffers=dict(zip(statistics, checksums_of_statistics, strict=True)),
        )
        if is_recorded:
            self.record.evaluations.append(self.evaluation)

    # --- backward, and numbers that are read

    def run_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass, and count it for each model whose gradients DDP or FSDP averages in it.

        This is called in the place of ``original``, which is ``torch.autograd.backward`` or ``torch.autograd.grad``.
        All ranks take part in such a backward pass, so its number is the same on all of them. By it, steps of different
        ranks are recognized as the same step.
        """
        self.backward_depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            self.backward_depth -= 1
            for model in self.models.values():
                if model.waits_for_backward:
                    model.waits_for_backward = False
                    model.calls.averaged += 1

    def read_number(self, tensor: torch.Tensor) -> None:
        """Before ``tensor.item()``: note where the script reads a loss, which is a number with a gradient.

        Only what the script reads itself counts. Then item() is called by no file of torch, or by _tensor.py, which has
        the ``__float__`` of float(loss).
        """
        is_loss = tensor.dim() == 0 and tensor.grad_fn is not None
        if is_loss and part_of_torch() in ("", "_tensor.py"):
            place = readers_line()
            if place not in self.record.loss_reads:
                self.record.loss_reads.append(place)

    def communicated(self) -> None:
        """After the script's own code has sent a tensor: note whether it did so in a forward, or for an evaluation.

        A model that communicates in its forward, as with experts, may rightly get the same batch on several ranks.
        After an evaluation, sending is taken for adding up the ranks' results.
        """
        is_in_forward = self.call_depth > 0 and self.backward_depth == 0
        if is_in_forward:
            for model in self.models.values():
                model.note.communicates = True
        if self.evaluation is not None:
            self.evaluation.reduced = True

    # --- steps of optimizers

    def ddp_built(self, result: Any, ddp: nn.Module, *args: Any, **kwargs: Any) -> None:
        """After a DistributedDataParallel was built: know the modules inside it before they are called."""
        self.observed(ddp)

    def optimizer_built(self, result: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """After an optimizer was built: note where, for a finding that it was built too early."""
        self.built[optimizer] = readers_line()

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """torch calls this before each step of any optimizer, with the step's arguments."""
        if self.is_finished or torch.compiler.is_compiling() or not self.patches.is_on():
            return
        # A ZeroRedundancyOptimizer has another optimizer inside, whose step runs within its own and does not count.
        is_nested = self.stepping is not None and self.stepping is not optimizer
        if not is_nested:
            self.patches.run(self.begin_step, optimizer)

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """torch calls this after each step of any optimizer. After the last step to observe, the observation ends."""
        if optimizer is self.stepping:
            self.stepping = None
            self.patches.run(self.optimizers[id(optimizer)].end, self)
            latest_step = self.record.steps[-1]
            if latest_step.number >= self.steps:
                self.stop()

    def begin_step(self, optimizer: Any) -> None:
        """Before a step: tell the other observers, and note what the step starts from."""
        if dist.is_initialized() and self.store is None:
            self.see_group()
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = ObservedOptimizer(optimizer, index=len(self.optimizers))
        observed = self.optimizers[id(optimizer)]
        observed.name_parameters(self)
        self.stepping = optimizer
        self.scalers.optimizer_steps(optimizer)
        self.loaders.optimizer_steps()
        observed.steps += 1
        observed.begin(self)

    def find_idle_optimizers(self) -> None:
        """At the end: find optimizers that hold parameters which the model no longer has, or that never got a gradient.

        fully_shard, or a conversion of the model, replaces parameters by others of the same shapes. (A shard is a
        DTensor, whose shape is that of the whole parameter.) An optimizer that was built before that holds the old
        parameters, and no optimizer holds the new ones. This is certain if their shapes are the same, in order.
        """
        trained = self.trained_parameters()
        optimized = {id(parameter) for observed in self.optimizers.values() for parameter in observed.parameters()}
        not_optimized = [parameter for parameter in trained if id(parameter) not in optimized]
        for observed in self.optimizers.values():
            stale = []  # parameters of this optimizer that no model has
            for parameter in observed.parameters():
                has_had_gradient = id(parameter) in observed.with_gradient
                if not has_had_gradient and parameter not in trained:
                    stale.append(parameter)
            line = self.built.get(observed.optimizer, observed.place)
            class_name = type(observed.optimizer).__name__
            if stale and shapes_of(stale) == shapes_of(not_optimized):
                sentence = (
                    f"{len(stale)} parameters of this {class_name} are not the model's, so its steps change nothing: "
                    f"{trained[not_optimized[0]]} of the model is in no optimizer."
                )
                self.record.add_finding("stale_optimizer", line, sentence)
            elif observed.never_got_a_gradient():
                sentence = f"{observed.steps} steps of this {class_name} found no gradient at any of its parameters."
                self.record.add_finding("no_gradient", line, sentence)

    def trained_parameters(self) -> dict[nn.Parameter, str]:
        """The parameters that require gradients, of all models that were called, each with its name in its model."""
        names: dict[nn.Parameter, str] = {}
        for model in self.models.values():
            was_called = model.name != ""
            if was_called:
                for name, parameter in model.module.named_parameters():
                    if parameter.requires_grad:
                        names[parameter] = name
        return names


def shapes_of(parameters: Iterable[torch.Tensor]) -> list[torch.Size]:
    """The shapes of these parameters, in order."""
    return [parameter.shape for parameter in parameters]


def batch_statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    """The running means and variances of a model's BatchNorm layers, by their names in the model.

    They are buffers, which nothing averages: each rank's come from its own batches.
    """
    statistics: dict[str, torch.Tensor] = {}
    for path, part in model.named_modules():  # the model's own path is ""
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            for name, buffer in part.named_buffers(recurse=False):
                full_name = f"{path}.{name}".lstrip(".")
                statistics[full_name] = buffer
    return statistics


def uncompiled(module: nn.Module) -> nn.Module:
    """The module itself, or the one that torch.compile has wrapped in it."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


# --- observing optimizers ---------------------------------------------------------------------------------------------
# What a step starts from, and what it leaves: checksums of weights and gradients under keys that all ranks share. An
# ObservedOptimizer keeps the keys, and which parameters ever had a gradient.


@dataclass(frozen=True)
class OwnedParameter:
    """The model that has a parameter, and the parameter's name there."""

    model: ObservedModel
    name: str


class ObservedOptimizer:
    """An optimizer, and what is noted of its steps.

    A parameter has a key, such as "DDP Net 1: weight", under which its checksums are noted. The key is the same on all
    ranks, so that their checksums can be compared.
    """

    def __init__(self, optimizer: Any, index: int) -> None:
        """Before the optimizer's first step. ``index``: which of the rank's optimizers it is, from 0."""
        self.optimizer = optimizer
        self.index = index
        self.steps = 0
        self.place = readers_line()
        self.keys: dict[int, str] = {}  # {a parameter's id: its key in the record}
        self.models: list[ObservedModel] = []  # the models that have its parameters
        self.with_gradient: set[int] = set()  # the ids of the parameters that ever had a gradient
        self.unsynchronized = False  # whether a step came while FSDP held gradients that were not reduced
        self.step: Step | None = None  # the latest

    def parameters(self) -> list[Any]:
        """The optimizer's parameters now, in order: a script may add some later."""
        return parameters_of(self.optimizer)

    def name_parameters(self, observer: TrainingObserver) -> None:
        """Before a step: give each new parameter a key that is the same on all ranks, and record what it is.

        The key is made of the name of the model that has the parameter and of its name there: "DDP Net 1: weight". If
        no known model has the parameter, the key is made of the optimizer's class: "SGD 0: parameter 3".
        """
        if all(id(parameter) in self.keys for parameter in self.parameters()):  # as in most steps
            return
        owned = self.find_owned(observer)
        for number, parameter in enumerate(self.parameters()):
            if id(parameter) in self.keys:
                continue
            model: ObservedModel | None = None
            owner_name = f"{type(self.optimizer).__name__} {self.index}"
            name = f"parameter {number}"
            if id(parameter) in owned:
                model = owned[id(parameter)].model
                name = owned[id(parameter)].name
                observer.use(model)
                owner_name = model.name
                if model not in self.models:
                    self.models.append(model)
            key = f"{owner_name}: {name}"
            self.keys[id(parameter)] = key
            observer.record.parameters[key] = describe(parameter, name, owner_name, model)

    def find_owned(self, observer: TrainingObserver) -> dict[int, OwnedParameter]:
        """Which model has which parameter, {a parameter's id: its model and its name}; report weights no longer tied.

        A model may be known both by itself and inside DDP. Its parameters are then taken to be DDP's.
        """
        owned: dict[int, OwnedParameter] = {}
        in_ddp = [model for model in observer.models.values() if model.note.wrapper == "DDP"]
        others = [model for model in observer.models.values() if model.note.wrapper != "DDP"]
        called_others = [model for model in others if model.name]
        for model in [*in_ddp, *called_others]:
            module = model.unwrapped()
            for name, parameter in module.named_parameters():
                owned.setdefault(id(parameter), OwnedParameter(model, name))  # the first model that has it counts
            for names in observer.states.broken_ties(module):
                sentence = f"{names} were one parameter when the model was built, and are two now."
                observer.record.add_finding("untied", readers_line(), sentence)
        return owned

    def never_got_a_gradient(self) -> bool:
        """Whether it is certain that something keeps all gradients from the optimizer, over several steps.

        Optimizers of other libraries may compute updates without gradients. Gradients that fully_shard holds because it
        was told not to reduce them are another mistake.
        """
        is_of_torch = type(self.optimizer).__module__.startswith("torch.optim")
        return is_of_torch and self.steps >= 3 and not self.with_gradient and not self.unsynchronized

    def note_gradients(self) -> None:
        """Note which parameters have a gradient now."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                self.with_gradient.add(id(parameter))

    def begin(self, observer: TrainingObserver) -> None:
        """Before a step of this optimizer: begin its record, with how models were called since the last step.

        At some steps, the record also has checksums of the gradients, and at the first one of the weights.
        """
        self.note_gradients()
        parameters = self.parameters()
        step = Step(
            optimizer=self.index,
            number=self.steps,
            place=readers_line(),
            rates=rates_of(self.optimizer),
            settings=settings_of(self.optimizer),
            calls={},
        )
        for model in self.models:
            # A copy, because the model goes on counting its calls.
            step.calls[model.name] = replace(model.calls, places=list(model.calls.places))
            self.check_sharded_gradients(model.module, step.place, observer)
            # These three are about the calls between two steps, so they begin anew.
            model.calls.synchronized = False
            model.calls.not_synchronized = None
            model.calls.around = None
        if self.steps == 1:
            step.before = self.checksums_of(parameters)
        self.note_averaging_by_hand(observer)
        if self.is_sampled(observer.steps):
            step.gradients = self.checksums_of([parameter.grad for parameter in parameters])
            step.gradient_means = self.gradient_means(observer.record)
        self.step = step
        observer.record.steps.append(step)

    def note_averaging_by_hand(self, observer: TrainingObserver) -> None:
        """Before a step: note whether the script has sent each gradient since the last step, as to average them.

        A script that averages gradients by hand sends each of them from where it is in memory. So the addresses of what
        was sent are compared with those of the gradients, and then forgotten.
        """
        sent_addresses = observer.communication.addresses
        gradients = [local_part(parameter.grad) for parameter in self.parameters() if parameter.grad is not None]
        if gradients and all(gradient.data_ptr() in sent_addresses for gradient in gradients):
            observer.record.averages_gradients = True
        sent_addresses.clear()

    def end(self, observer: TrainingObserver) -> None:
        """After a step: note checksums of the weights."""
        self.note_gradients()  # a closure may have made them within the step
        if self.step is not None and self.is_sampled(observer.steps):
            self.step.after = self.checksums_of(self.parameters())

    def is_sampled(self, last: int) -> bool:
        """Whether checksums are noted at this step: at steps 1, 2, 4, 8, … and at ``last``, the last to be observed.

        Checksums of all weights take time. Weights that differ once stay different, so a few steps are enough.
        """
        is_power_of_two = self.steps.bit_count() == 1
        return is_power_of_two or self.steps == last

    def checksums_of(self, tensors: Sequence[Any]) -> dict[str, int]:
        """{a parameter's key: the checksum of its tensor}. ``tensors`` has one for each parameter, in their order."""
        keys = [self.keys[id(parameter)] for parameter in self.parameters()]
        return dict(zip(keys, checksums(tensors), strict=True))

    def gradient_means(self, record: Record) -> dict[str, float]:
        """The mean absolute value of the gradient of each DTensor, {the parameter's key: the mean}.

        Means are compared and not checksums, because each rank with a replica of the parameter computes the gradient
        itself, so that the bits may differ by rounding. ``record`` says which parameters are DTensors.
        """
        means: dict[str, float] = {}
        for parameter in self.parameters():
            key = self.keys[id(parameter)]
            gradient = parameter.grad
            if gradient is None:
                continue
            if record.parameters[key].kind != "DTensor":
                continue
            # The values of a partial DTensor are still to be added up over ranks, so those of one rank say nothing.
            if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
                continue
            values = local_part(gradient).detach()
            sum_of_sizes: Any = values.float().abs().sum().tolist()
            means[key] = sum_of_sizes / max(1, values.numel())
        return means

    def check_sharded_gradients(self, module: nn.Module, place: Place, observer: TrainingObserver) -> None:
        """Before a step: find gradients that fully_shard has not reduced, because the script told it not to.

        It keeps them where no optimizer sees them, so the step goes without them. ``place`` is the line of the step.
        """
        holds_gradients = False
        for group in parameter_groups(module):
            if any(holds_unreduced_gradient(fsdp_parameter) for fsdp_parameter in group.fsdp_params):
                holds_gradients = True
        if holds_gradients and not self.unsynchronized:
            self.unsynchronized = True
            sentence = "The optimizer steps while fully_shard holds gradients that it has not reduced."
            observer.record.add_finding("not_synchronized", place, sentence)


def holds_unreduced_gradient(fsdp_parameter: Any) -> bool:
    """Whether fully_shard keeps a gradient of the whole parameter, which it has not reduced to the ranks' shards."""
    if getattr(fsdp_parameter, "unsharded_accumulated_grad", None) is not None:
        return True
    whole = getattr(fsdp_parameter, "_unsharded_param", None)  # up to PyTorch 2.14 the gradient stays there
    return getattr(whole, "grad", None) is not None


def parameters_of(optimizer: Any) -> list[Any]:
    """The parameters of all groups of an optimizer, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def rates_of(optimizer: Any) -> tuple[float, ...]:
    """The learning rate of each group of an optimizer's parameters. torch allows it to be a tensor."""
    rates = []
    for group in optimizer.param_groups:
        rate = group.get("lr")  # an optimizer of another library may have none
        if isinstance(rate, torch.Tensor):
            rate = value_of(rate)
        if rate is not None:
            rates.append(float(rate))
    return tuple(rates)


def settings_of(optimizer: Any) -> int:
    """A checksum of an optimizer's settings, such as its momentum, without the learning rate.

    Ranks whose optimizers have other settings train on purpose models of their own, as in a search for the best ones.
    """
    no_settings = ("params", "lr", "initial_lr", "param_names")
    settings = []
    for group in optimizer.param_groups:
        for name, value in group.items():
            is_plain = isinstance(value, (int, float, bool, str, tuple, type(None)))
            if is_plain and name not in no_settings:
                settings.append((name, value))
    return crc(settings)


def parameter_groups(module: nn.Module) -> Iterator[Any]:
    """Yields the groups of parameters that fully_shard made in a module. A group is gathered and reduced at once."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # before PyTorch 2.12 there is one
                groups = [state._fsdp_param_group]
            yield from (group for group in groups if group is not None)


def mesh_ranks(module: nn.Module) -> tuple[int, ...]:
    """The ranks of the mesh on which fully_shard divides a module, or none if it has no parameters of its own."""
    first_group = next(parameter_groups(module), None)
    if first_group is None:
        return ()
    device_mesh = first_group.mesh_info.mesh
    ranks = device_mesh.mesh  # the tensor in which a DeviceMesh holds the ranks' numbers
    return tuple(ranks.flatten().tolist())


# The communication hooks of DDP after which all ranks have the same gradients. Another hook may average otherwise.
AVERAGING_HOOKS = (
    "allreduce_hook",
    "fp16_compress_hook",
    "bf16_compress_hook",
    "powerSGD_hook",
    "batched_powerSGD_hook",
)


def describe(parameter: Any, name: str, owner: str, model: ObservedModel | None) -> Parameter:
    """Describe a parameter of an optimizer: its kind, and which ranks hold replicas of it, which have to stay equal.

    ``model`` is the model that has the parameter, or None if no known model has it, and ``name`` is the parameter's
    name there. ``owner`` is the name of the model, or else of the optimizer.
    """
    replicas: tuple[int, ...] = ()
    if model is not None and isinstance(model.module, DistributedDataParallel):
        if is_averaged(model.module, name):
            kind = "DDP"
            replicas = model.note.data_ranks
        else:
            kind = "not averaged by DDP"
    elif isinstance(parameter, DTensor):
        replicas = replicas_of(parameter)
        if is_on_mesh_of_one(parameter) and dist.get_world_size() > 1:
            kind = "mesh of one"
        else:
            kind = "DTensor"
    else:
        kind = "plain"
    size = local_part(parameter).numel()  # of this rank's part
    return Parameter(model=owner, name=name, kind=kind, size=size, replicas=replicas)


def is_on_mesh_of_one(parameter: DTensor) -> bool:
    """Whether the mesh of a DTensor has only one rank, and is no part of a larger mesh."""
    mesh = parameter.device_mesh
    if hasattr(mesh, "_get_root_mesh"):  # not every version has it
        mesh = mesh._get_root_mesh()
    return mesh.size() == 1


def is_averaged(ddp: DistributedDataParallel, name: str) -> bool:
    """Whether DDP gives all ranks the same gradient of the parameter of this name.

    A communication hook takes the place of DDP's own averaging. Of an unknown one nothing is certain.
    """
    hooks = [getattr(hook, "__name__", "") for hook, _ in getattr(ddp, "_comm_hooks", [])]  # each with its state
    return name not in ddp.parameters_to_ignore and all(hook in AVERAGING_HOOKS for hook in hooks)


def replicas_of(parameter: DTensor) -> tuple[int, ...]:
    """The ranks that hold the same part of a DTensor as this rank; empty if no other rank does.

    For example, on a mesh of (2, 2) ranks, [[0, 1], [2, 3]], a DTensor may be replicated along the first dimension and
    divided along the second. Then ranks 1 and 3 hold the same part.
    """
    mesh = parameter.device_mesh
    own_coordinate: Any = mesh.get_coordinate()  # such as [0, 1] of rank 1
    index: list[Any] = []  # where in the mesh, which is a tensor of ranks, the replicas are
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            index.append(slice(None))  # all ranks along this dimension
        else:
            index.append(own_coordinate[dimension])
    ranks = tuple(mesh.mesh[tuple(index)].flatten().tolist())
    if len(ranks) == 1:
        return ()
    return ranks


# --- comparing the ranks: what the rules share ------------------------------------------------------------------------
# ``compare`` gets the notes of all ranks and asks each rule. A rule is a function from these notes to findings. It
# keeps nothing, and is silent where it is not certain. ``RULES``, at the end, has them all.

# After these mistakes the ranks' weights drift apart. If one of them is found, "drift" is not reported beside it.
CAUSES_OF_DRIFT = ("different_noise", "uneven_steps", "different_start", "stale_optimizer")


def compare(records: Sequence[Record]) -> list[Finding]:
    """All findings of a check: those that a rank made by itself, and those of comparing what the ranks observed."""
    findings = findings_of_single_ranks(records)
    if len(records) > 1:
        for rule in RULES:
            findings += rule(records)
    cause_of_drift_is_known = any(found.kind in CAUSES_OF_DRIFT for found in findings)
    if cause_of_drift_is_known:
        findings = [found for found in findings if found.kind != "drift"]
    return without_repetitions(findings)


def findings_of_single_ranks(records: Sequence[Record]) -> list[Finding]:
    """What the ranks found each by itself. What several ranks found in the same way is one finding of all of them."""
    ranks_of: dict[Finding, set[int]] = {}  # {a finding without its ranks: the ranks that have it}
    for record in records:
        for found in record.findings:
            without_ranks = replace(found, ranks=())
            ranks_of.setdefault(without_ranks, set()).update(found.ranks)
    return [replace(found, ranks=tuple(sorted(ranks))) for found, ranks in ranks_of.items()]


def without_repetitions(findings: Iterable[Finding]) -> list[Finding]:
    """The findings in their order, each once. A line that runs in every step may have found the same each time."""
    return list(dict.fromkeys(findings))  # a dictionary keeps the order in which its keys came


def equal(values: Iterable[Any]) -> bool:
    """Whether all values are equal, such as the ranks' notes of one thing."""
    values = list(values)
    return all(value == values[0] for value in values)


def is_wrapped(records: Sequence[Record]) -> bool:
    """Whether some model is wrapped, so that several ranks average its gradients.

    Beside a wrapped model, an unwrapped one may be a reference that each rank trains alone, so nothing is said of it.
    """
    for record in records:
        if any(len(model.data_ranks) > 1 for model in record.models.values()):
            return True
    return False


def sends_by_hand(records: Sequence[Record]) -> bool:
    """Whether the script's own code sends what may be gradients or weights, so that it may average them itself.

    Small tensors are taken for metrics, unless some parameter has their size.
    """
    for record in records:
        sizes = {parameter.size for parameter in record.parameters.values()}
        if record.sent_large or not record.sent_sizes.isdisjoint(sizes):
            return True
    return False


def common_steps(records: Sequence[Record]) -> list[list[Step]]:
    """The optimizer steps that all ranks made, in order. Each is a list, [rank 0's Step, rank 1's Step, …].

    Steps of different ranks are the same step if they have the same number and are of the same optimizer.
    """
    if not records:
        return []
    steps_by_number = []  # for each rank: {(the optimizer, the number of the step): the step}
    for record in records:
        steps_by_number.append({(step.optimizer, step.number): step for step in record.steps})
    steps_of_first_rank = steps_by_number[0]
    common = []
    for optimizer_and_number in steps_of_first_rank:
        if all(optimizer_and_number in steps for steps in steps_by_number):
            common.append([steps[optimizer_and_number] for steps in steps_by_number])
    return common


def initial_weights(record: Record) -> dict[str, int]:
    """{a parameter's key: its checksum before the first step of its optimizer}."""
    weights: dict[str, int] = {}
    for step in record.steps:
        weights |= step.before
    return weights


def same_settings(records: Sequence[Record]) -> bool:
    """Whether the ranks' optimizers have equal settings.

    Replicas of one training have. A search for the best settings gives each rank other ones.
    """
    for steps in common_steps(records):
        if not equal((step.rates, step.settings) for step in steps):
            return False
    return True


def plain_replicas(records: Sequence[Record], kinds: set[str]) -> bool:
    """Whether all ranks certainly train the same unwrapped model: equal parameters, with equal settings.

    ``kinds`` are the kinds of parameters that the model may have, such as {"plain"}.
    """
    if len(records) < records[0].world_size:  # a rank has sent nothing, so it may train something else
        return False
    if is_wrapped(records):
        return False
    parameters_of_ranks = []
    for record in records:
        described = {key: (parameter.kind, parameter.size) for key, parameter in record.parameters.items()}
        parameters_of_ranks.append(described)
    if not parameters_of_ranks[0] or not equal(parameters_of_ranks):
        return False
    kinds_of_model = {parameter.kind for parameter in records[0].parameters.values()}
    return kinds_of_model <= kinds and same_settings(records)


def names_of(keys: Iterable[str]) -> str:
    """The first of some parameters by name, and how many more there are: "weight and 3 more".

    A parameter's key, such as "DDP Net 1: weight", has its name after the colon.
    """
    names = [key.split(": ", 1)[1] for key in keys]
    if len(names) == 1:
        return names[0]
    return f"{names[0]} and {len(names) - 1} more"


# --- comparing the ranks: do weights that should be equal stay equal? -------------------------------------------------
# Of a wrapped model, of one that is averaged by hand, and of one that nobody averages.


def find_weights_that_differ(records: Sequence[Record]) -> list[Finding]:
    """Find replicas of DDP's parameters, or of a DTensor, that differ. ``records`` are what each rank observed.

    Replicas have to begin equal, and each step has to leave them equal.
    """
    if not equal(record.device for record in records):
        return []  # GPUs of two kinds may round differently
    findings = []
    for replicas in replicated_parameters(records):
        first_key = replicas.keys[0]
        holders = [record for record in records if record.rank in replicas.ranks and first_key in record.parameters]
        if len(holders) < 2:
            continue
        if left_out_steps(replicas.model, holders):  # find_uneven_steps reports these
            continue
        starts = [initial_weights(record) for record in holders]
        different = [key for key in replicas.keys if not equal(start.get(key) for start in starts)]
        if different:
            line = holders[0].steps[0].place
            sentence = f"{names_of(different)} differ on {listed(replicas.ranks)} before the first step."
            findings.append(finding("different_start", line, replicas.ranks, sentence))
            continue

        is_in_ddp = holders[0].parameters[first_key].kind == "DDP"
        if not is_in_ddp:
            findings += find_gradients_that_differ(replicas, holders)
        # A script that sends weights or gradients itself may let its replicas differ for some steps on purpose.
        elif not any(record.sent_large for record in holders):
            findings += explain_drift(replicas, holders)
    return findings


@dataclass(frozen=True)
class Replicas:
    """Parameters of one model, given by their keys, that should be equal on some ranks."""

    model: str
    ranks: tuple[int, ...]
    keys: list[str] = field(default_factory=list)


def replicated_parameters(records: Sequence[Record]) -> list[Replicas]:
    """Which parameters should be equal on which ranks, one entry for each model and its ranks."""
    groups: dict[tuple[str, tuple[int, ...]], Replicas] = {}
    for record in records:
        for key, parameter in record.parameters.items():
            if len(parameter.replicas) < 2:
                continue
            model_and_ranks = (parameter.model, parameter.replicas)
            replicas = groups.setdefault(model_and_ranks, Replicas(parameter.model, parameter.replicas))
            if key not in replicas.keys:
                replicas.keys.append(key)
    return list(groups.values())


def explain_drift(replicas: Replicas, holders: Sequence[Record]) -> list[Finding]:
    """If replicas of a model inside DDP come to differ, a finding with the reason, or "drift" if there is no known one.

    Otherwise the list is empty. ``holders`` are the records of the ranks that hold the replicas. Weights are compared
    only after some of the steps, so the mistake may be in any step since they were equal.
    """
    # The steps since the weights were last seen to be equal; each is a list, [rank 0's Step, rank 1's Step, …].
    suspects: list[list[Step]] = []
    different: list[str] = []  # the keys of the parameters that differ
    for step_of_ranks in common_steps(holders):
        step_of_first_rank = step_of_ranks[0]
        weights_were_noted = not step_of_first_rank.after.keys().isdisjoint(replicas.keys)
        if weights_were_noted or replicas.model in step_of_first_rank.calls:
            suspects.append(step_of_ranks)
        if weights_were_noted:
            different = [key for key in replicas.keys if not equal(step.after.get(key) for step in step_of_ranks)]
            if different:
                break
            suspects = []
    if not different:
        return []
    for step_of_ranks in suspects:
        reason = reason_to_drift(replicas, step_of_ranks)
        if reason is not None:
            return [reason]
    last_suspect = suspects[-1][0]
    sentence = (
        f"{names_of(different)} differ on {listed(replicas.ranks)} after step {last_suspect.number}, "
        "although DDP made them equal."
    )
    return [finding("drift", last_suspect.place, replicas.ranks, sentence)]


def reason_to_drift(replicas: Replicas, step_of_ranks: Sequence[Step]) -> Finding | None:
    """The mistake before one step after which DDP's replicas of a model differ, or None if no known one was made.

    ``step_of_ranks`` is this step as each rank noted it. The mistakes are a last call inside no_sync, calls past DDP,
    and different learning rates.
    """
    for step in step_of_ranks:
        calls = step.calls[replicas.model]  # how this rank called the model before the step
        if calls.not_synchronized is not None:
            sentence = "The last call before optimizer.step() is inside no_sync: its gradients stay on their rank."
            return finding("not_synchronized", calls.not_synchronized, replicas.ranks, sentence)
        if calls.around is not None and not calls.synchronized:
            sentence = "The module inside DDP is called here, not DDP: no gradient is averaged before the step."
            return finding("around_the_wrapper", calls.around, replicas.ranks, sentence)
    if equal(step.rates for step in step_of_ranks):
        return None
    rates: list[str] = []  # those of the first group of parameters, which usually is the only one
    for step in step_of_ranks:
        if step.rates and f"{step.rates[0]:g}" not in rates:
            rates.append(f"{step.rates[0]:g}")
    first = step_of_ranks[0]
    sentence = f"From step {first.number} on, replicas use different learning rates: {' and '.join(rates)}."
    return finding("different_rates", first.place, replicas.ranks, sentence)


# By rounding, even to bfloat16, the means of two replicas' gradients differ by less than this part of the largest mean.
# It is the largest of all parameters, because a gradient that is small beside the others may be nothing but rounding.
ROUNDING_OF_MEANS = 0.05


def find_gradients_that_differ(replicas: Replicas, holders: Sequence[Record]) -> list[Finding]:
    """Find a replicated DTensor whose gradients differ between ranks by more than rounding can explain.

    What is compared is the mean absolute value of the gradient: each rank with a replica computes the gradient itself,
    so its bits may differ. ``holders`` are the records of the ranks that hold the replicas.
    """
    for step_of_ranks in common_steps(holders):
        means_of_all_parameters: list[float] = []  # on all ranks
        for step in step_of_ranks:
            means_of_all_parameters += step.gradient_means.values()
        largest_mean = max(means_of_all_parameters, default=0.0)
        largest_rounding = ROUNDING_OF_MEANS * largest_mean
        for key in replicas.keys:
            means = [step.gradient_means[key] for step in step_of_ranks if key in step.gradient_means]
            if len(means) < len(step_of_ranks):  # a rank has no gradient of this parameter
                continue
            if max(means) - min(means) > largest_rounding:
                ranks = listed(replicas.ranks)
                sentence = (
                    f"The gradient of {names_of([key])} differs on {ranks}, which hold replicas of it: "
                    f"its mean size is {min(means):.2g} on one and {max(means):.2g} on another."
                )
                return [finding("drift", step_of_ranks[0].place, replicas.ranks, sentence)]
    return []


def find_unwrapped(records: Sequence[Record]) -> list[Finding]:
    """Find a model that is not wrapped, or not over all ranks, so that the weights of the ranks drift apart.

    It is certain if the ranks train one model, and no rank sends anything. A script that averages weights every 500
    steps has to be observed for more than 500, or has to allow "drift". ``records`` are what each rank observed.
    """
    if sends_by_hand(records):
        return []
    if not equal(record.device for record in records):  # GPUs of two kinds may round differently
        return []
    drifted = first_step_of_drift(records)
    if drifted is None:
        return []

    ranks = [record.rank for record in records]
    if plain_replicas(records, {"mesh of one"}):
        sentence = f"fully_shard divides the model over one rank, so {listed(ranks)} train models of their own."
        return [finding("mesh_of_one", drifted.place, ranks, sentence)]

    starts_equal = equal(initial_weights(record) for record in records)
    if plain_replicas(records, {"plain"}) and divides_one_training(records) and starts_equal:
        sentence = (
            f"The model is equal on {listed(ranks)} before the first step and differs after step {drifted.number}: "
            "nothing averages its gradients."
        )
        return [finding("drift", drifted.place, ranks, sentence)]
    return []


def first_step_of_drift(records: Sequence[Record]) -> Step | None:
    """The first step after which the ranks' weights differ for good, or None. Something may average them at times."""
    drifted = None
    for step_of_ranks in common_steps(records):
        if not step_of_ranks[0].after:  # no checksums were noted after this step
            continue
        if equal(step.after for step in step_of_ranks):
            drifted = None
        elif drifted is None:
            drifted = step_of_ranks[0]
    return drifted


def divides_one_training(records: Sequence[Record]) -> bool:
    """Whether the script says that the ranks train one model: it divides a dataset among them, or rank 0 saves it.

    Otherwise each rank may train a model of its own on purpose, as in a search for the best settings.
    """
    ranks_with_divided_data = []
    for record in records:
        if any(epoch.divided and epoch.steps > 0 for epoch in record.epochs):
            ranks_with_divided_data.append(record.rank)
    divides_data = len(ranks_with_divided_data) == len(records)
    saving_ranks = [record.rank for record in records if record.saves]
    return divides_data or saving_ranks == [0]


def find_different_start(records: Sequence[Record]) -> list[Finding]:
    """Find replicas that the script itself keeps equal, by averaging gradients, and that differed from the start.

    The script certainly averages the gradients if they are equal on all ranks in the first step of each optimizer, and
    change all weights. ``records`` are what each rank observed.
    """
    if not plain_replicas(records, {"plain"}):
        return []
    starts = [initial_weights(record) for record in records]
    different = [key for key in starts[0] if not equal(start[key] for start in starts)]
    if not different:
        return []
    for step_of_ranks in common_steps(records):
        is_first_step = bool(step_of_ranks[0].before)  # the weights before a step are noted at the first one alone
        if not is_first_step:
            continue
        keys = list(step_of_ranks[0].gradients)
        if not keys or not equal(step.gradients for step in step_of_ranks):
            return []
        for step in step_of_ranks:
            # Gradients that leave a weight as it is may be zero, so they may be equal without any averaging.
            if any(step.after.get(key) == step.before.get(key) for key in keys):
                return []
    ranks = [record.rank for record in records]
    sentence = f"{listed(ranks).capitalize()} apply equal gradients to different weights: {names_of(different)}."
    return [finding("different_start", records[0].steps[0].place, ranks, sentence)]


# --- comparing the ranks: are samples, orders and random numbers different where they should be? ----------------------
# The ranks that train one model are compared two at a time, and an order with the one of the rank's last epoch.


def data_parallel_ranks(model: str, records: Sequence[Record]) -> set[int]:
    """The ranks that should train the model of this name on different data; empty if that is not certain.

    They are the ranks among which DDP or fully_shard averages the gradients. For a model without a wrapper they are all
    ranks, if it starts equal on them, and if the script averages all its gradients itself, or sends nothing.
    """
    models = [record.models[model] for record in records if model in record.models]
    if any(known.communicates for known in models):
        return set()  # a model that communicates in its forward may rightly get the same data on several ranks
    if models[0].wrapper:
        return set(models[0].data_ranks)

    starts_equal = equal(initial_weights(record) for record in records)
    if not plain_replicas(records, {"plain"}) or not starts_equal:
        return set()
    averages_by_hand = all(record.averages_gradients for record in records)
    if averages_by_hand or not sends_by_hand(records):
        return {record.rank for record in records}
    return set()


def models_of(records: Sequence[Record]) -> list[str]:
    """The names of all models that any rank uses, each once."""
    names: list[str] = []
    for record in records:
        for name in record.models:
            if name not in names:
                names.append(name)
    return names


def common_models(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Yields (name, records) of each model that several ranks train on data of their own, with these ranks' records."""
    for model in models_of(records):
        ranks = data_parallel_ranks(model, records)
        holders = [record for record in records if record.rank in ranks and model in record.models and record.steps]
        if len(holders) > 1:
            yield model, holders


def forwards_of(record: Record, model: str) -> list[Forward]:
    """A rank's calls of a model in training, in order."""
    return [forward for forward in record.forwards if forward.model == model]


def epochs_of(record: Record, model: str) -> list[Epoch]:
    """The epochs whose batches a model was trained on."""
    return [epoch for epoch in record.epochs if model in epoch.models]


@dataclass(frozen=True)
class PairOfRanks:
    """Two ranks that train a model, and their calls of it: as many of each as both have made."""

    first: Record
    second: Record
    first_calls: list[Forward]
    second_calls: list[Forward]

    @property
    def ranks(self) -> tuple[int, int]:
        """The numbers of the two ranks."""
        return self.first.rank, self.second.rank

    def calls(self) -> Iterator[tuple[Forward, Forward]]:
        """The first call of both, the second call of both, and so on."""
        return zip(self.first_calls, self.second_calls, strict=True)


def pairs_of_ranks(model: str, holders: Sequence[Record]) -> Iterator[PairOfRanks]:
    """Yields each pair of the ranks that train a model, whose records are given."""
    for first, second in itertools.combinations(holders, 2):
        first_calls = forwards_of(first, model)
        second_calls = forwards_of(second, model)
        common = min(len(first_calls), len(second_calls))
        yield PairOfRanks(first, second, first_calls[:common], second_calls[:common])


def find_same_samples(records: Sequence[Record]) -> list[Finding]:
    """Find ranks that train on the same samples. ``records`` are what each rank observed.

    Either their models get equal inputs in each call, or their loaders give out equal indices of equal datasets.
    """
    findings = []
    for model, holders in common_models(records):
        for pair in pairs_of_ranks(model, holders):
            batches = {call.inputs for call in pair.first_calls}  # a checksum of each different batch
            elements = sum(call.elements for call in pair.first_calls)
            inputs_are_equal = all(first_call.inputs == second_call.inputs for first_call, second_call in pair.calls())
            is_no_benchmark = len(batches) > 1  # a benchmark may train on one batch again and again on purpose
            is_no_chance = elements >= FEWEST_ELEMENTS  # a few numbers may be equal by chance
            if inputs_are_equal and is_no_benchmark and is_no_chance:
                sentence = f"{listed(pair.ranks).capitalize()} train on the same {len(batches)} batches."
                place = source_of(pair.first, pair.first_calls[0])
                findings.append(finding("same_samples", place, pair.ranks, sentence))
            else:
                findings += find_same_indices(model, pair.first, pair.second)
    return merged(findings)


def source_of(record: Record, forward: Forward) -> Place:
    """The line of the loop over the loader that is trained on, or else that of the model's call."""
    for epoch in record.epochs:
        if epoch.steps:
            return epoch.place
    return forward.place


def find_same_indices(model: str, first: Record, second: Record) -> list[Finding]:
    """Find a loader that gives two ranks the same indices of equal datasets. Returns one finding, or none.

    Both ranks train ``model``. Their batches may differ although the samples are the same, because each rank augments
    its own. So the indices are compared, which the sampler gave in each epoch.
    """
    epochs_of_both = zip(epochs_of(first, model), epochs_of(second, model), strict=False)  # as far as both have come
    for epoch, other_epoch in epochs_of_both:
        has_same_dataset = epoch.dataset is not None and epoch.dataset == other_epoch.dataset
        if not has_same_dataset:
            continue
        if epoch.loader != other_epoch.loader:
            continue
        few_steps = min(epoch.steps, other_epoch.steps) < 2
        if few_steps or epoch.samples < FEWEST_SAMPLES:  # the indices may be equal by chance
            continue
        if equal_beginnings(epoch.indices, other_epoch.indices):
            ranks = (first.rank, second.rank)
            sentence = f"The {epoch.sampler} gives {listed(ranks)} the same indices of the same dataset."
            return [finding("same_samples", epoch.place, ranks, sentence)]
    return []


def equal_beginnings(first: list[int], second: list[int]) -> bool:
    """Whether two lists of at least two batches are equal as far as the shorter one goes."""
    length = min(len(first), len(second))
    return length >= 2 and first[:length] == second[:length]


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings of the same kind at the same line, which different pairs of ranks have, into one of all the ranks.

    So "Ranks 0 and 1 draw …" and "Ranks 0 and 2 draw …" become "Ranks 0, 1 and 2 draw …".
    """
    by_line: dict[tuple[str, str, int], Finding] = {}  # {(kind, file, line): the finding there}
    for found in findings:
        key = (found.kind, found.file, found.line)
        if key not in by_line:
            by_line[key] = found
            continue
        earlier = by_line[key]
        all_ranks = tuple(sorted({*earlier.ranks, *found.ranks}))
        # The sentence names the ranks, too, and may begin with them.
        old_words = listed(earlier.ranks)
        new_words = listed(all_ranks)
        sentence = earlier.sentence.replace(old_words, new_words)
        sentence = sentence.replace(old_words.capitalize(), new_words.capitalize())
        by_line[key] = replace(earlier, ranks=all_ranks, sentence=sentence)
    return list(by_line.values())


def find_same_noise(records: Sequence[Record]) -> list[Finding]:
    """Find ranks whose dropout drops the same units, because it starts from the same random state, in each batch.

    Only ranks whose batches differ are reported. ``records`` are what each rank observed.
    """
    findings = []
    for model, holders in common_models(records):
        for pair in pairs_of_ranks(model, holders):
            forward_passes = len(pair.first_calls)
            has_dropout = all(call.noise is not None for call in pair.first_calls)
            same_state = all(first_call.noise == second_call.noise for first_call, second_call in pair.calls())
            different_batches = all(first_call.inputs != second_call.inputs for first_call, second_call in pair.calls())
            if forward_passes >= 3 and has_dropout and same_state and different_batches:
                sentence = (
                    f"{listed(pair.ranks).capitalize()} drop the same units in each of {forward_passes} forward passes."
                )
                findings.append(finding("same_noise", pair.first_calls[0].place, pair.ranks, sentence))
    return merged(findings)


def find_same_augmentation(records: Sequence[Record]) -> list[Finding]:
    """Find datasets that give two ranks different samples, but draw the same random numbers to augment them.

    ``records`` are what each rank observed.
    """
    findings = []
    for model, holders in common_models(records):
        for first, second in itertools.combinations(holders, 2):
            # The first epoch of both ranks, the second one of both, and so on, as far as both have come.
            epochs_of_both = zip(epochs_of(first, model), epochs_of(second, model), strict=False)
            for epoch, other_epoch in epochs_of_both:
                if draw_the_same(epoch, other_epoch):
                    ranks = (first.rank, second.rank)
                    sentence = f"{listed(ranks).capitalize()} draw the same random numbers for different samples."
                    findings.append(finding("same_noise", epoch.place, ranks, sentence))
    return merged(findings)


def draw_the_same(first: Epoch, second: Epoch) -> bool:
    """Whether two ranks drew the same random numbers for different samples, in each of at least three batches.

    The two are epochs of the ranks. Their ``noise`` has a number for each batch: a checksum of the random states from
    which its samples drew, or 0 if they drew nothing. ``indices`` has a checksum of the samples' indices.
    """
    noted_batches = min(len(first.noise), len(second.noise), len(first.indices), len(second.indices))
    # The first batch is left out, because a sampler may draw its order while that batch is loaded.
    compared_batches = range(1, noted_batches)
    if min(len(compared_batches), first.steps, second.steps) < 3:
        return False
    for batch in compared_batches:
        if first.noise[batch] == 0:  # nothing was drawn
            return False
        if first.noise[batch] != second.noise[batch]:
            return False
        if first.indices[batch] == second.indices[batch]:
            return False
    return True


def find_different_noise(records: Sequence[Record]) -> list[Finding]:
    """Find a dropout that drops different units of the same activation on two tensor-parallel ranks.

    Its input is then equal on both ranks, and its output is not. ``records`` are what each rank observed.
    """
    for first, second in itertools.combinations(records, 2):
        different = []
        for dropout, other in zip(first.dropouts, second.dropouts, strict=False):  # as far as both have come
            is_same_group = second.rank in dropout.ranks
            same_input = dropout.before == other.before
            same_output = dropout.after == other.after
            if is_same_group and same_input and not same_output:
                different.append(dropout)
        if len(different) >= 2:
            ranks = (first.rank, second.rank)
            sentence = f"A dropout gets the same activation on {listed(ranks)} and drops different units of it."
            return [finding("different_noise", different[0].place, ranks, sentence)]
    return []


def find_repeated_orders(records: Sequence[Record]) -> list[Finding]:
    """Find two epochs of one loader, both trained on, that have the same order, although the sampler shuffles.

    A DistributedSampler gives a new order only after ``set_epoch`` with another number. ``records`` are the notes of
    all ranks, each of which is looked at alone.
    """
    findings = []
    for record in records:
        epochs_by_loader = sorted(record.epochs, key=lambda epoch: epoch.loader)  # those of one loader keep their order
        for earlier, later in itertools.pairwise(epochs_by_loader):
            if earlier.loader != later.loader:
                continue
            if not earlier.shuffled:
                continue
            if min(earlier.steps, later.steps) < 2:  # the model was not trained on one of the two
                continue
            has_epochs = later.sampler_epoch >= 0
            same_epoch = has_epochs and earlier.sampler_epoch == later.sampler_epoch
            is_no_chance = later.samples >= FEWEST_SAMPLES  # a few samples may be in the same order by chance
            if same_epoch and is_no_chance and equal_beginnings(earlier.indices, later.indices):
                sentence = (
                    f"The {later.sampler} gives the same order in two epochs: its epoch stays {later.sampler_epoch}."
                )
                findings.append(finding("same_order", later.place, [record.rank], sentence))
    return merged(findings)


# --- comparing the ranks: are wrapped models called, and steps made, equally often? -----------------------------------
# A call that communicates, or a step, that some ranks leave out is paired with a later one of theirs.


def wrapped_models(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Yields (name, records) of each wrapped model, with the records of the ranks that average its gradients.

    A model inside torch's Join is left out, because there ranks may call it differently often.
    """
    for model in models_of(records):
        holders = [record for record in records if model in record.models and record.steps]
        if not holders or any(record.models[model].joins for record in holders):
            continue
        note = holders[0].models[model]
        if note.wrapper:
            yield model, [record for record in holders if record.rank in note.data_ranks]


def find_calls_on_some_ranks(records: Sequence[Record]) -> list[Finding]:
    """Find a wrapped model that some ranks call more often than others before a step, as to validate on rank 0 alone.

    These calls communicate, so they pair up with different calls of the other ranks. ``records`` are what each rank
    observed. Only the first difference is reported: the counts go on, so all later steps differ too.
    """
    for model, holders in wrapped_models(records):
        for step_of_ranks in common_steps(holders):
            calls_of_ranks = {}  # {rank: how it has called the model until this step}
            for record, step in zip(holders, step_of_ranks, strict=True):
                if model in step.calls:
                    calls_of_ranks[record.rank] = step.calls[model]
            found = compare_calls(calls_of_ranks, step_of_ranks[0])
            if found is not None:
                return [found]
    return []


def compare_calls(calls_of_ranks: dict[int, Calls], step: Step) -> Finding | None:
    """A finding if some ranks have called a wrapped model more often than others before a step, or None.

    ``calls_of_ranks`` is {rank: how it has called the model until this step}. ``step`` is the step as one rank made it.
    """
    if len(calls_of_ranks) < 2:
        return None
    # If the ranks have not averaged gradients equally often, a step was left out, which is a different mistake.
    if not equal(calls.averaged for calls in calls_of_ranks.values()):
        return None

    with_gradients = {rank: calls.to_average for rank, calls in calls_of_ranks.items()}
    if not equal(with_gradients.values()):
        return uneven_calls(with_gradients, "with gradients", calls_of_ranks, step)

    without_gradients = {rank: calls.to_broadcast for rank, calls in calls_of_ranks.items()}
    if not equal(without_gradients.values()):
        # This does not make the check fail, because programs that evaluate on rank 0 alone mostly work: DDP broadcasts
        # its buffers in a call without gradients, and leaves that out in the next call, so the ranks' broadcasts pair
        # up. (Between the first two steps they do not, because there DDP also broadcasts its buckets.)
        found = uneven_calls(without_gradients, "without gradients", calls_of_ranks, step)
        return replace(found, is_note=True)
    return None


def uneven_calls(counts: dict[int, int], manner: str, calls_of_ranks: dict[int, Calls], step: Step) -> Finding:
    """The finding that some ranks have called a wrapped model more often than others before ``step``.

    ``counts`` is {rank: how often}, and ``manner`` says which calls are counted, such as "with gradients".
    ``calls_of_ranks``, {rank: its calls}, has the lines of the calls. The finding is at a line that only the rank with
    the most calls has, if there is one, or else at the step.
    """
    busiest_rank = max(counts, key=lambda rank: counts[rank])
    idlest_rank = min(counts, key=lambda rank: counts[rank])
    most = counts[busiest_rank]
    fewest = counts[idlest_rank]
    line = step.place
    common_lines = calls_of_ranks[idlest_rank].places
    extra_lines = [place for place in calls_of_ranks[busiest_rank].places if place not in common_lines]
    if extra_lines:
        line = extra_lines[0]
    ranks = [rank for rank, count in counts.items() if count > fewest]
    sentence = (
        f"Before step {step.number}, the wrapped model is called {manner} {most} times on {listed(ranks)} "
        f"and {fewest} times elsewhere."
    )
    return finding("rank_alone", line, ranks, sentence)


@dataclass(frozen=True)
class LeftOutStep:
    """A step of an optimizer that a rank did not make. ``step`` is another rank's note of it."""

    rank: int
    step: Step


def left_out_steps(model: str, holders: Sequence[Record]) -> list[LeftOutStep]:
    """The optimizer steps that some ranks made after a backward pass of a model, and other ranks did not.

    In the backward pass the gradients are averaged, so all ranks take part, and its number is the same on all ranks. A
    step has the number of the backward pass before it. ``holders`` are the records of the ranks that train the model.
    """
    left_out = []
    for optimizer in optimizers_of(model, holders):
        steps_of_ranks: dict[int, dict[int, Step]] = {}  # {rank: {number of a backward pass: the step after it}}
        for record in holders:
            steps = [step for step in record.steps if step.optimizer == optimizer and model in step.calls]
            steps_of_ranks[record.rank] = {step.calls[model].averaged: step for step in steps}
        if not all(steps_of_ranks.values()):  # a rank has made no step at all
            continue

        # Later backward passes are not compared, because some rank was not observed that long.
        last_compared = min(max(steps) for steps in steps_of_ranks.values())
        for rank, own_steps in steps_of_ranks.items():
            for steps_of_other in steps_of_ranks.values():
                for backward_pass, step in steps_of_other.items():
                    if backward_pass <= last_compared and backward_pass not in own_steps:
                        left_out.append(LeftOutStep(rank, step))
    return left_out


def optimizers_of(model: str, holders: Sequence[Record]) -> list[int]:
    """The numbers of the optimizers that have parameters of a model, in order."""
    numbers = set()
    for record in holders:
        numbers |= {step.optimizer for step in record.steps if model in step.calls}
    return sorted(numbers)


def find_uneven_steps(records: Sequence[Record]) -> list[Finding]:
    """Find steps of an optimizer that some ranks leave out, as a rank may do that skips a step after a large loss.

    ``records`` are what each rank observed.
    """
    for model, holders in wrapped_models(records):
        left_out = left_out_steps(model, holders)
        if left_out:
            step = left_out[0].step
            ranks = {missing.rank for missing in left_out}
            sentence = (
                f"{listed(ranks).capitalize()} did not make the optimizer step that is step {step.number} elsewhere."
            )
            return [finding("uneven_steps", step.place, ranks, sentence)]
    return []


# --- comparing the ranks: are evaluations, logs and files those of all ranks? -----------------------------------------
# What ranks do with their results, apart from the training itself.


def find_different_buffers(records: Sequence[Record]) -> list[Finding]:
    """Find replicas that evaluate different data with different batch statistics, and then add up their results.

    The sum then depends on which rank evaluates which data. ``records`` are what each rank observed.
    """
    # {(model, number of the evaluation): {rank: the evaluation there}}
    evaluations: dict[tuple[str, int], dict[int, Evaluation]] = {}
    for record in records:
        for evaluation in record.evaluations:
            if evaluation.reduced:
                by_rank = evaluations.setdefault((evaluation.model, evaluation.number), {})
                by_rank[record.rank] = evaluation
    for by_rank in evaluations.values():
        different = different_statistics(list(by_rank.values()))
        if different:
            ranks = list(by_rank)
            line = by_rank[ranks[0]].place
            sentence = f"{different[0]} differs on {listed(ranks)}, whose results are then added up."
            return [finding("different_buffers", line, ranks, sentence)]
    return []


def different_statistics(evaluations: Sequence[Evaluation]) -> list[str]:
    """The names of batch statistics that differ between ranks in an evaluation, which is given as each rank made it.

    Empty unless several ranks evaluate different data with equal weights.
    """
    same_weights = equal(evaluation.weights for evaluation in evaluations)
    same_data = equal(evaluation.inputs for evaluation in evaluations)
    if len(evaluations) < 2 or not same_weights or same_data:
        return []
    names = evaluations[0].buffers
    return [name for name in names if not equal(evaluation.buffers.get(name) for evaluation in evaluations)]


def find_own_losses(records: Sequence[Record]) -> list[Finding]:
    """Find a loss that rank 0 reads, for example to log it, although it is only the loss of rank 0's share of the data.

    It is certain if rank 0 alone reads a loss, if no rank ever sends something as small as a loss, and if each rank has
    different batches. ``records`` are what each rank observed.
    """
    records_with_reads = [record for record in records if record.loss_reads]
    only_rank_0_reads = [record.rank for record in records_with_reads] == [0]
    if not only_rank_0_reads:
        return []
    something_small_is_sent = any(record.sent_sizes for record in records)
    if something_small_is_sent:
        return []
    for model, holders in common_models(records):
        first_batches = set()  # checksums
        for record in holders:
            calls = forwards_of(record, model)
            if len(calls) >= 2:
                first_batches.add(calls[0].inputs)
        each_rank_has_its_own = len(first_batches) == len(holders)
        if each_rank_has_its_own:
            sentence = "Rank 0 alone reads the loss, and no rank ever reduces one: it is the loss of rank 0's share."
            first_line = records_with_reads[0].loss_reads[0]
            return [finding("own_loss", first_line, [0], sentence)]
    return []


def find_same_files(records: Sequence[Record]) -> list[Finding]:
    """Find files that several ranks of one host write at about the same time. ``records`` are what each rank observed.

    It is about the same time if all of them have made the same number of steps when they first write the file.
    """
    # {(host, path, steps made): {rank: the line that writes the file}}
    writers: dict[tuple[str, str, int], dict[int, Place]] = {}
    for record in records:
        for path, save in record.saves.items():
            lines_by_rank = writers.setdefault((record.host, path, save.steps_made), {})
            lines_by_rank[record.rank] = save.place
    findings = []
    for (_host, path, _steps_made), lines_by_rank in writers.items():
        if len(lines_by_rank) > 1:
            ranks = list(lines_by_rank)
            first_line = lines_by_rank[ranks[0]]
            sentence = f"{listed(ranks).capitalize()} all write {os.path.basename(path)} at the same time."
            findings.append(finding("same_file", first_line, ranks, sentence))
    return findings


RULES = (
    find_same_samples,
    find_repeated_orders,
    find_weights_that_differ,
    find_unwrapped,
    find_different_start,
    find_same_noise,
    find_same_augmentation,
    find_different_noise,
    find_calls_on_some_ranks,
    find_uneven_steps,
    find_different_buffers,
    find_own_losses,
    find_same_files,
)


if __name__ == "__main__":
    main()
