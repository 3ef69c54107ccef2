"""``with check_training():`` finds mistakes of distributed training that raise no error.

Every rank puts it around its training, in an existing process group. While the first steps run, each rank records
checksums of its batches, weights, gradients and buffers, and who called what. At the end the records of all ranks are
compared, and a finding is reported only if it is certain. The records travel through the group's store and not through
a collective, so a rank that makes fewer steps than another, or that fails, keeps nobody waiting longer than
``patience`` seconds.

The file needs only PyTorch and the standard library, so it can be copied beside a script. It can also run a script that
was not changed:

    torchrun --nproc-per-node=2 training_check.py train.py --flags-of-the-script

Its parts come in the order of a check: what a user calls, the mistakes that it knows, the record of a rank, the check
from beginning to end, what observes a rank (in six parts, after the functions that all of them use), and the rules that
compare the ranks' records.

"The user" is whoever reads the report: the author of the training script.
"""

import argparse
import functools
import gc
import inspect
import itertools
import json
import os
import pickle
import random
import runpy
import socket
import struct
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
from torch.distributed.checkpoint.metadata import TensorStorageMetadata as TensorMetadata
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info
from torch.utils.data import dataloader as dataloader_module
from torch.utils.data._utils.fetch import _MapDatasetFetcher

# --- what a user calls ------------------------------------------------------------------------------------------------
# ``check_training`` is put around a training, and ``main`` is the command that runs an unchanged script inside a check.
# Both begin and end a TrainingCheck, which has all the state.

PATIENCE_AFTER_ERROR = 2  # seconds for which a rank that has failed waits for the others' records


@contextmanager
def check_training(steps: int = 20, patience: float = 30, allow: Iterable[str] = ()) -> Iterator["TrainingCheck"]:
    """A context around a training: it is observed until an optimizer has made ``steps`` steps.

    Enter it on every rank of a process group. Rank 0 prints a report to stderr as soon as all ranks have made these
    steps, or at the end of the context. There it waits for the other ranks' records at most ``patience`` seconds, or
    PATIENCE_AFTER_ERROR after an exception. ``allow`` names kinds of findings to leave out, such as "drift"; an unknown
    kind raises ValueError. The context's value is a TrainingCheck, which has ``findings`` on each rank at the end.
    """
    check = TrainingCheck(steps, patience, allow)
    check.start()
    hook = register_optimizer_step_post_hook(check.after_step)
    try:
        yield check
    except BaseException:
        # Another rank may wait in a collective until this one is gone.
        check.patience = min(check.patience, PATIENCE_AFTER_ERROR)
        raise
    finally:
        hook.remove()
        check.finish()


def main() -> None:
    """The command: run a script under torchrun as ``__main__``, with its own flags, and check its training.

    It does what ``check_training`` does, but cannot use that context: the script makes its process group itself, and
    may end the group before the ranks' records are compared.
    """
    args = parse_arguments()
    check = TrainingCheck(args.steps, patience=60, allow=args.allow)
    # The script finds what it would find if Python itself had been started with it.
    sys.argv = [args.script, *args.flags]
    sys.path[0] = os.path.dirname(os.path.abspath(args.script))

    check.start()
    try:
        runpy.run_path(args.script, run_name="__main__")
    finally:
        check.observer.stop()
        has_other_ranks = check.observer.record.world_size > 1
        if has_other_ranks:
            check.observer.store = connect_to_torchrun_store()
        check.finish()
        is_rank_0 = check.observer.record.rank == 0
        if args.json and is_rank_0:
            write_findings(check.findings or [], args.json)


def parse_arguments() -> argparse.Namespace:
    """Read the flags of the command, the script to run, and the script's own flags from the command line."""
    parser = argparse.ArgumentParser(description="Run a script under torchrun, and look for mistakes without errors.")
    parser.add_argument("--steps", type=int, default=200, help="steps of an optimizer to observe (default: 200)")
    parser.add_argument("--allow", action="append", default=[], metavar="KIND", help="a kind of finding to leave out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there, too")
    parser.add_argument("script", help="the script; its own flags follow")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    return parser.parse_args()


def connect_to_torchrun_store() -> dist.Store:
    """Connect to the store that torchrun serves. It is still there when the script has ended its process group."""
    rendezvous = dist.rendezvous("env://")  # an iterator over (store, rank, world size)
    store, _, _ = next(rendezvous)
    return store


def write_findings(findings: Sequence["Finding"], path: Path) -> None:
    """Write the findings to a JSON file, as a list of objects."""
    objects = [asdict(finding) for finding in findings]
    path.write_text(json.dumps(objects, indent=1))


# --- the kinds of mistakes --------------------------------------------------------------------------------------------
# All kinds that a check looks for, and what it says of one that it has found. Nothing here changes while it runs.


@dataclass(frozen=True)
class Kind:
    """What is wrong, how to repair it, and the section of the book that explains it.

    A note is a kind that is reported, but does not make a check fail, because many programs do it on purpose.
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
        "notebooks/07b_tensor_parallel_in_practice.ipynb#dropout-under-tensor-parallelism",
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
class CodeLine:
    """A line of the user's own code."""

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


def make_finding(kind: str, code_line: CodeLine, ranks: Iterable[int], sentence: str) -> Finding:
    """The Finding that a mistake of this kind was made at a line of the user's code, on these ranks.

    ``kind`` is a key of KINDS, such as "drift", from which the cure and the page come. ``sentence`` says what exactly
    is wrong: "The weights differ after step 2."
    """
    known_kind = KINDS[kind]
    return Finding(
        kind=kind,
        file=code_line.file,
        line=code_line.line,
        ranks=tuple(sorted(ranks)),
        sentence=sentence,
        cure=known_kind.cure,
        page=known_kind.page,
        is_note=known_kind.is_note,
    )


# --- the record of a rank ---------------------------------------------------------------------------------------------
# What the observers write down, as plain dataclasses: a rank's Record has all the others in it. It is pickled and sent
# to rank 0, so it has only numbers, texts and lines of code, and no tensor or module.


@dataclass
class Model:
    """A module that the training loop calls. ``wrapper``: "DDP", "FSDP" or "" for none.

    ``data_ranks`` are the ranks that average its gradients, so their data should differ.
    """

    wrapper: str
    data_ranks: tuple[int, ...]
    communicates: bool = False  # in its own forward, as with experts or a divided sequence
    is_in_join: bool = False  # inside torch's Join, where ranks may make different numbers of steps


@dataclass
class Parameter:
    """A parameter of an optimizer.

    ``kind`` is one of these:
    - "DDP", for a parameter inside DDP, which averages its gradient, or "not averaged by DDP";
    - "DTensor", or "mesh of one" for a DTensor whose mesh has only one rank;
    - "plain", for any other.
    """

    model: str  # the name of the model that has it, or of the optimizer if no known model has it
    name: str  # its name there
    kind: str
    size: int  # its number of elements on this rank
    replicas: tuple[int, ...]  # the ranks that should hold the same values; empty if there are none, or not known


@dataclass
class Forward:
    """A call of a model while gradients are recorded, as in training."""

    model: str
    code_line: CodeLine
    inputs: int  # a checksum
    elements: int  # numbers in the inputs
    rows: int = 0  # samples in the inputs, see ``most_rows``
    dropout_state: int | None = None  # a checksum of the random state with which dropout began; None without dropout


@dataclass
class Calls:
    """How a wrapped model was called before a step. The counts run from the first step on."""

    to_average: int  # calls whose gradients a backward pass would average
    to_broadcast: int  # calls without gradients in which DDP broadcasts its buffers
    averaged: int  # backward passes that averaged the gradients
    synchronized: bool = False  # whether the gradients of a call since the last step are to be averaged
    line_in_no_sync: CodeLine | None = None  # the last call before the step, if it was in no_sync
    line_past_wrapper: CodeLine | None = None  # a call of the wrapped module itself, past its wrapper
    code_lines: list[CodeLine] = field(default_factory=list)  # the lines of the calls that are counted


@dataclass
class Step:
    """One step of an optimizer. The dictionaries of weights and gradients have the parameters' keys (see Record)."""

    optimizer: int  # which of the rank's optimizers, from 0
    number: int  # which of the optimizer's steps, from 1
    code_line: CodeLine
    learning_rates: tuple[float, ...]  # the learning rate of each group of parameters
    settings: int  # a checksum of the optimizer's other settings
    calls: dict[str, Calls]  # by the model's name
    weights_before: dict[str, int] = field(default_factory=dict)  # checksums, for the optimizer's first step only
    gradients: dict[str, int] = field(default_factory=dict)  # checksums
    gradient_means: dict[str, float] = field(default_factory=dict)  # mean absolute values, of DTensors only
    weights_after: dict[str, int] = field(default_factory=dict)  # checksums


@dataclass
class Epoch:
    """One pass over a DataLoader."""

    loader: int  # which of the rank's loaders, from 0
    code_line: CodeLine
    dataset: int | None  # a checksum, or None if the dataset holds nothing that could be summed
    samples: int  # samples of the dataset, or 0 for a stream
    sampler: str  # the name of the sampler's class
    divided: bool  # whether a DistributedSampler divides the dataset among ranks
    shuffled: bool
    sampler_epoch: int  # what set_epoch was given last, or -1 for a sampler that has no epoch
    padded_length: int  # samples of all ranks with those that the sampler repeats, or 0 if it repeats none
    indices: list[int] = field(default_factory=list)  # checksums of the indices of its first batches
    # For each of the first batches, a checksum of the random states from which loading it drew numbers, as to augment
    # its samples; 0 if it drew none. Batches that drew the same numbers have equal checksums.
    random_draws: list[int] = field(default_factory=list)
    models: list[str] = field(default_factory=list)  # the models that got its batches while gradients were recorded
    steps: int = 0  # steps of an optimizer after a batch of this loader
    batches_evaluated: int = 0  # batches that a model got while no gradients were recorded
    rows: int = 0  # samples in its largest batch, see ``most_rows``


@dataclass
class Evaluation:
    """The first call of an evaluation. ``inputs``, ``weights`` and ``buffers`` are checksums."""

    model: str
    number: int  # which of the model's evaluations, from 0
    code_line: CodeLine
    inputs: int
    weights: int  # of all parameters, or 0 if the model is sharded
    buffers: dict[str, int]  # the batch statistics by their names in the model
    reduced: bool = False  # whether this rank communicated afterwards, as in adding up the ranks' results


@dataclass
class Dropout:
    """A call of a dropout on a tensor-parallel rank. ``input`` and ``output`` are checksums."""

    code_line: CodeLine
    ranks: tuple[int, ...]  # of the tensor-parallel group
    input: int
    output: int


@dataclass(frozen=True)
class Save:
    """The first time that a rank writes a file with torch.save, after so many steps of its optimizers."""

    steps_made: int
    code_line: CodeLine


@dataclass
class Record:
    """All that was observed on one rank.

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
    loss_reads: list[CodeLine] = field(default_factory=list)
    saves: dict[str, Save] = field(default_factory=dict)  # by the file's path
    # What the script's own code communicates, and not DDP, fully_shard or another part of torch for it:
    sends_large_tensors: bool = False  # whether it sends tensors that may be gradients or weights
    # The numbers of elements of the small tensors that it sends:
    sizes_of_small_tensors: set[int] = field(default_factory=set)
    averages_gradients: bool = False  # whether it sends the gradient of each parameter before a step
    findings: list[Finding] = field(default_factory=list)  # of which one rank can be certain alone
    failures: list[str] = field(default_factory=list)  # tracebacks of this check itself

    def add_finding(self, kind: str, code_line: CodeLine, sentence: str) -> None:
        """Add a mistake of this rank. ``rank`` may not be known yet, so ``TrainingObserver.stop`` fills it in."""
        self.findings.append(make_finding(kind, code_line, (), sentence))


# --- a check, from beginning to end -----------------------------------------------------------------------------------
# A TrainingCheck starts the observation of its rank, puts the rank's record into the store, and on rank 0 compares the
# records of all ranks and prints the report. It keeps the observer, and the findings once there are any.


def mistakes_among(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that make a check fail: all but the notes."""
    return [finding for finding in findings if not finding.is_note]


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
    last = numbers.pop()
    if not numbers:
        return f"rank {last}"
    return f"ranks {', '.join(numbers)} and {last}"


def report(findings: Sequence[Finding], failures: Sequence[str] = ()) -> str:
    """The text that a check prints, under the title *silent mistakes*: first the mistakes, then the notes.

    A note is a finding that many programs have on purpose. ``failures`` are tracebacks of errors in the check itself.
    The report counts them, because the check may then have missed something.
    """
    lines = ["silent mistakes"]
    if not mistakes_among(findings):
        lines.append(f"  none of the {len(KINDS)} kinds")
    mistakes_first = sorted(findings, key=lambda finding: finding.is_note)
    for finding in mistakes_first:
        lines += describe_finding(finding)
    if failures:
        traceback_lines = failures[0].strip().splitlines()
        exception = traceback_lines[-1]
        lines.append(f"  The check itself failed {len(failures)} times, so it is not complete: {exception}")
    return "\n".join(lines)


def describe_finding(finding: Finding) -> list[str]:
    """The three lines of a report about one finding: where it is, how to repair it, and where the book explains it."""
    where = f"{short_name(finding.file)}:{finding.line}, {listed(finding.ranks)}"
    if finding.is_note:
        where = f"note: {where}"
    return [
        f"  {where}: {finding.sentence}",
        f"    {finding.cure}",
        f"    {finding.page}  (--allow {finding.kind})",
    ]


def check_allowed(allow: Iterable[str]) -> None:
    """Raise ValueError if one of the kinds of findings that a user wants to leave out does not exist."""
    unknown = sorted(set(allow) - set(KINDS))
    if unknown:
        raise ValueError(f"There is no kind {unknown[0]}. Known are {', '.join(KINDS)}.")


class TrainingCheck:
    """One check on one rank. ``findings`` is None until the ranks' records are compared.

    The ranks communicate through the store of their process group, a dictionary that one process serves. Each rank puts
    its record there. Rank 0 compares them, prints the report, and puts the findings there for the other ranks. No rank
    waits in a collective, at which a rank that has failed would never arrive.
    """

    next_number = itertools.count()  # All ranks make the same checks in the same order, so a check has one number.

    def __init__(self, steps: int, patience: float, allow: Iterable[str]) -> None:
        """Make a check that observes nothing before ``start``. The arguments are those of ``check_training``."""
        check_allowed(allow)
        self.name = f"training_check/{next(self.next_number)}"  # the same on all ranks; begins its keys in the store
        self.patience = patience
        self.allow = set(allow)
        self.observer = TrainingObserver(steps)
        self.is_published = False  # whether this rank's record is in the store
        self.missing: list[int] = []  # ranks whose records did not come in time
        self.findings: list[Finding] | None = None

    def start(self) -> None:
        """Begin the observation of this rank."""
        self.observer.start()
        if dist.is_initialized():
            self.observer.see_group()

    def publish(self) -> None:
        """Put this rank's record into the store, if it is not there yet. The observer has stopped."""
        if self.is_published or self.observer.store is None:
            return
        self.is_published = True
        record = self.observer.record
        self.observer.store.set(self.record_key(record.rank), pickle.dumps(record))

    def record_key(self, rank: int) -> str:
        """The key of the store under which a rank's record is."""
        return f"{self.name}/rank{rank}"

    def findings_key(self) -> str:
        """The key of the store under which rank 0 puts the findings."""
        return f"{self.name}/findings"

    def published_ranks(self) -> list[int]:
        """The ranks whose records are in the store now. It does not wait for the others."""
        ranks = range(self.observer.record.world_size)
        return [rank for rank in ranks if self.observer.store.check([self.record_key(rank)])]

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """torch calls this after each step of any optimizer: publish this rank's record once the observation is over.

        When all ranks have published their records, rank 0 reports at once, so that the user need not wait for the end
        of a long training.
        """
        if not self.observer.is_finished or self.observer.store is None:
            return
        self.publish()
        record = self.observer.record
        has_to_report = record.rank == 0 and self.findings is None
        if has_to_report and len(self.published_ranks()) == record.world_size:
            self.compare_ranks()

    def finish(self) -> None:
        """End the observation, and set ``findings``. Rank 0 reports; the other ranks get the findings from rank 0.

        A rank waits for what the others put into the store, but at most ``patience`` seconds.
        """
        self.observer.stop()
        self.observer.remove_hooks()
        has_reported = self.findings is not None
        if has_reported:
            return
        own_record = self.observer.record
        store = self.observer.store
        if store is None:  # the script has made no process group, so this rank is alone
            self.conclude([own_record])
            return

        try:
            self.publish()
            if own_record.rank == 0:
                self.wait_for([self.record_key(rank) for rank in range(own_record.world_size)])
                self.compare_ranks()  # those whose records have come in time
            elif self.wait_for([self.findings_key()]):
                self.findings = pickle.loads(store.get(self.findings_key()))
        except RuntimeError as error:  # the store has gone with the process that served it
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
        """On rank 0: compare the records that have come, report, and send the findings to the other ranks."""
        store = self.observer.store
        published_ranks = self.published_ranks()
        records = []
        self.missing = []
        for rank in range(self.observer.record.world_size):
            if rank in published_ranks:
                records.append(pickle.loads(store.get(self.record_key(rank))))
            else:
                self.missing.append(rank)
        self.conclude(records)
        store.set(self.findings_key(), pickle.dumps(self.findings))

    def conclude(self, records: Sequence[Record]) -> None:
        """Set ``findings`` to what these records show, without the allowed kinds. Rank 0 also prints them."""
        self.findings = [finding for finding in compare(records) if finding.kind not in self.allow]
        if self.observer.record.rank != 0:
            return
        failures: list[str] = []
        for record in records:
            failures += record.failures
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
def is_user_code(file: str) -> bool:
    """Whether a source file is the user's own code, and not a library's or this check's.

    A finding has to point at a line that the user can change. Lines of torch, Python and packages are no use.
    """
    is_part_of_python = file.startswith("<frozen")
    if is_part_of_python:
        return False
    path = os.path.realpath(file)
    if path == THIS_FILE or path.startswith((TORCH, *LIBRARIES)):
        return False
    # In the project that this file comes from, its folder is a library that launches the user's code.
    folder = os.path.dirname(THIS_FILE)
    is_in_launching_library = os.path.basename(folder) == "helpers" and path.startswith(folder + os.sep)
    return not is_in_launching_library


def user_code_line() -> CodeLine:
    """The line of the user's code that is running now: the innermost one, which called torch, which called this check.

    It is looked for from this function outwards: each frame's ``f_back`` is its caller. If no frame is the user's, the
    result has an empty file name.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return CodeLine(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return CodeLine("", 0)


def caller_in_torch() -> str:
    """The file of torch that has called an observed function, or "" if the user's code has called it directly.

    For example "nn/parallel/distributed.py" if DDP calls all_reduce. So what a script communicates itself is told from
    what DDP or fully_shard communicates for it.
    """
    passed_by_every_call = ("distributed_c10d.py", "c10d_logger.py")  # these define the collectives
    frame = sys._getframe(1)
    while frame is not None:  # from here outwards, caller by caller
        if is_user_code(frame.f_code.co_filename):
            return ""
        file = os.path.realpath(frame.f_code.co_filename)
        is_in_torch = file.startswith(TORCH + os.sep)
        if is_in_torch and not file.endswith(passed_by_every_call):
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
ROWS_OF_DATASET = 256  # how many rows of a tensor are summed to distinguish one dataset from another


@torch.no_grad()
def checksum_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit checksum of a tensor's bytes, as an int64 tensor on its device, so that nothing waits for a GPU.

    The bytes are read as words of 8 bytes, and word number k, counted from 0, is multiplied by 2k + 1. So the same
    words in another order give another sum. The tensor is summed in chunks of CHUNK bytes, which bounds the memory for
    the products. A tensor whose bytes cannot be read, such as a sparse one, has the checksum 0.
    """
    all_bytes = bytes_of(tensor)
    if all_bytes is None:
        return torch.zeros((), dtype=torch.int64)

    # The sum begins with the number of bytes, so that zeros at the end change it, too.
    total = torch.full((), all_bytes.numel(), dtype=torch.int64, device=all_bytes.device)
    word_size = 8  # bytes
    words_per_chunk = CHUNK // word_size
    for chunk_number, chunk in enumerate(all_bytes.split(CHUNK)):
        missing_bytes = -len(chunk) % word_size  # zeros that complete the last word of the tensor
        words = nn.functional.pad(chunk, (0, missing_bytes)).view(torch.int64)
        first_factor = 2 * chunk_number * words_per_chunk + 1
        odd_factors = torch.arange(first_factor, first_factor + 2 * len(words), 2, device=all_bytes.device)
        products = words * odd_factors  # integers of torch wrap at 2**64
        mixed = products ^ (products >> 32)  # so that the upper half of each product changes the lower half
        total += mixed.sum()
    return total


def bytes_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The bytes of a tensor's values as a flat tensor of dtype uint8, or None if they cannot be read.

    They cannot be read from a sparse, quantized or meta tensor, nor from one whose memory fully_shard has freed.
    """
    data = local_part(tensor).detach()
    has_bytes = data.layout == torch.strided and not data.is_quantized and not data.is_meta
    if not has_bytes or data.untyped_storage().nbytes() == 0:
        return None
    # A view may be marked to be conjugated or negated only when it is read.
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj())
    return data.resolve_neg().contiguous().flatten().view(torch.uint8)


def checksums(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """The checksum of each tensor, and 0 for None, in the order of the tensors.

    A copy from a GPU to the host waits for the GPU. So all checksums of one device are computed first, and then copied
    to the host at once.
    """
    on_devices: dict[torch.device, dict[int, torch.Tensor]] = {}  # {device: {index of a tensor: its checksum}}
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            checksum = checksum_tensor(tensor)
            on_devices.setdefault(checksum.device, {})[index] = checksum
    results = [0] * len(tensors)
    for checksum_of_index in on_devices.values():
        values = torch.stack(list(checksum_of_index.values())).tolist()
        for index, value in zip(checksum_of_index, values, strict=True):
            results[index] = value
    return results


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


def most_rows(tensors: Sequence[torch.Tensor]) -> int:
    """The largest first dimension among tensors, which is the number of samples if they are a batch; 0 without any."""
    rows = [tensor.shape[0] for tensor in tensors if tensor.dim() > 0]
    return max(rows, default=0)


def random_state(device: torch.device) -> int:
    """A checksum of the state from which the device draws its next random numbers. Equal states give equal numbers."""
    if device.type == "cuda":
        return checksums([torch.cuda.get_rng_state(device)])[0]
    return checksums([torch.get_rng_state()])[0]


def random_states(dataset: Any) -> dict[str, int]:
    """Checksums of the states of all random number generators that a dataset may use, such as {"torch": 4711, …}.

    They are torch's generator, Python's, NumPy's if the script uses it, and generators that are attributes of the
    dataset. A state that changes while a sample is loaded shows that the dataset has drawn random numbers from it.
    """
    torch_generators = {"torch": torch.default_generator, **generators_in(dataset)}
    sums = checksums([generator.get_state() for generator in torch_generators.values()])
    states = dict(zip(torch_generators, sums, strict=True))
    states["random"] = crc(random.getstate())
    numpy = sys.modules.get("numpy")  # not imported here, because a script without NumPy draws nothing from it
    if numpy is not None:
        # NumPy's state is the algorithm's name, an array of words, and numbers. repr() would shorten the array.
        _, words, *numbers = numpy.random.get_state()
        states["numpy"] = crc((words.tobytes(), numbers))
    return states


def generators_in(dataset: Any) -> dict[str, torch.Generator]:
    """The torch.Generators that are attributes of a dataset, or of the datasets that it wraps.

    A dataset such as torch's Subset has the dataset that it wraps as its attribute ``dataset``. The names are the same
    on all ranks: "0 generator" is an attribute of the dataset itself, "1 generator" one of the dataset that it wraps.
    """
    generators = {}
    depth = 0
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
    """A checksum of a dataset's attributes, by which ranks can tell whether they have equal datasets.

    Two ranks whose samplers give equal indices train on the same samples only if their datasets are equal. None if no
    attribute can be summed. ``depth`` says how many levels of objects in objects are looked into.
    """
    summaries = []
    for name, value in sorted(attributes_of(dataset).items()):
        summary = summary_of(value, depth)
        if summary:
            summaries.append((name, summary))
    if not summaries:
        return None
    return crc((type(dataset).__name__, summaries))


def summary_of(value: Any, depth: int) -> tuple[Any, ...]:
    """A few values that distinguish an attribute of a dataset from the same attribute on another rank:

    - of a tensor, its shape and a checksum of its first rows;
    - of a text or a number, itself;
    - of a list, what ``summary_of_list`` says;
    - of an object that can be indexed, such as a dataset that this one wraps, a checksum of its attributes;
    - nothing of anything else.

    ``depth`` says how many levels of objects in objects are looked into.
    """
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), checksums_of_first_rows([value]))
    if isinstance(value, (str, int, float)):
        return (value,)
    if isinstance(value, (list, tuple, range)) and len(value) > 0:
        return summary_of_list(value)
    is_object_with_items = hasattr(value, "__getitem__") and hasattr(value, "__dict__")
    if is_object_with_items and depth > 0:
        return (dataset_checksum(value, depth - 1),)
    return ()


def summary_of_list(items: Sequence[Any]) -> tuple[Any, ...]:
    """A few values that distinguish a list from another: its length, its two ends, and the tensors in it.

    For a list of 60,000 file names they are (60000, ["a.png", "z.png"], [], []).
    """
    ends = [items[0], items[-1]]
    plain_ends = [end for end in ends if isinstance(end, (str, int, float, tuple))]
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    return (len(items), plain_ends, shapes, checksums_of_first_rows(tensors))


def checksums_of_first_rows(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Checksums of the first rows of tensors, because all rows of a dataset may be many gigabytes."""
    first_rows = []
    for tensor in tensors:
        if tensor.dim() > 0:
            tensor = tensor[:ROWS_OF_DATASET]
        first_rows.append(tensor)
    return checksums(first_rows)


# --- what all observers use: replaced functions of torch --------------------------------------------------------------
# Patches has the list of what was replaced, and restores it at the end. The limits below hold for all observers.

LARGEST_METRIC = 16  # elements of a tensor that is taken for a metric, unless a parameter has the same size
LARGEST_OBJECT = 4096  # bytes of a pickled Python object that is taken for metrics, and not for a model's state

# With fewer of these, what is compared may be equal by chance:
FEWEST_SAMPLES = 8  # of a dataset, if its order is compared, or the number of its samples
FEWEST_BATCHES = 2  # at the beginning of two epochs
FEWEST_ELEMENTS = 32  # numbers in the batches of two ranks
FEWEST_DRAWS = 3  # batches, or calls of a model, whose random numbers are compared

# Records of the first batches, calls and failures are enough for a comparison, and must not grow with the training:
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


def positional_names(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters that a function takes by position, in their order; none if Python cannot tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some functions of C++ have no signature
        return []
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


def by_position(
    names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a call's arguments by position where that is possible: the call ``f(1, b=2)`` becomes ``f(1, 2)``.

    A script may name arguments, as in ``clip_grad_norm_(parameters, max_norm=1)``, but a hook has other names for its
    parameters. ``names`` are the function's ``positional_names``. Returns the new (args, kwargs).
    """
    if not kwargs:
        return args, kwargs
    rest = dict(kwargs)
    in_order = list(args)
    for name in names[len(args) :]:
        if name not in rest:
            break
        in_order.append(rest.pop(name))
    return tuple(in_order), rest


class Patches:
    """Functions and methods of torch that are replaced while the check runs. ``remove`` restores them.

    torch has no hooks for most of what has to be observed. So the observers replace what a script calls: ``before`` and
    ``after`` add a hook, a function that records something, and ``around`` lets an observer's method take the call
    over. A hook that fails must not end the training: its traceback goes into the record instead.
    """

    def __init__(self, record: Record) -> None:
        """Nothing is replaced yet. The check observes the process and the thread in which this is called."""
        self.record = record  # gets the tracebacks of hooks that fail
        self.process = os.getpid()  # the process and the thread that train
        self.thread = threading.get_ident()
        self.is_in_hook = False  # whether a hook runs now
        self.undo: list[Callable[[], None]] = []  # functions that restore what was replaced, the latest last
        self.functions: dict[int, ReplacedFunction] = {}  # {id of the original function of a module: both functions}

    def observes_call(self) -> bool:
        """Whether a replaced function that is called now has to tell the observers.

        Only the script's own calls count, in the process and the thread that train:
        - A DataLoader's workers are forks of the process, and nobody would read what is recorded there.
        - A hook may itself call a replaced function.
        - After ``remove``, other modules may still have a replacement.
        """
        is_training = os.getpid() == self.process and threading.get_ident() == self.thread
        is_patched = len(self.undo) > 0
        return is_training and is_patched and not self.is_in_hook

    def observes_worker(self) -> bool:
        """Whether this process is a worker of a DataLoader that was forked while the check ran."""
        is_fork = os.getpid() != self.process and get_worker_info() is not None
        is_patched = len(self.undo) > 0
        return is_fork and is_patched and not self.is_in_hook

    def run(self, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a hook; return what it returns, or None if it failed. What the hook itself calls is not observed."""
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

        ``owner`` is a class or a module: ``before(torch, "save", hook)``.
        """
        original = getattr(owner, name)
        names = positional_names(original)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            # While torch.compile traces, it would take the hook into its graph.
            if not torch.compiler.is_compiling() and self.observes_call():
                in_order, rest = by_position(names, args, kwargs)
                self.run(hook, *in_order, **rest)
            return original(*args, **kwargs)

        self.replace(owner, name, replacement)

    def after(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        """From now on, call ``hook`` after each call of the function ``owner.name``, which is as in ``before``.

        The hook gets the function's result, and after it the arguments of the call.
        """
        original = getattr(owner, name)
        names = positional_names(original)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            # While torch.compile traces, it would take the hook into its graph.
            if not torch.compiler.is_compiling() and self.observes_call():
                in_order, rest = by_position(names, args, kwargs)
                self.run(hook, result, *in_order, **rest)
            return result

        self.replace(owner, name, replacement)

    def around(
        self, owner: Any, name: str, method: Callable[..., Any], in_worker: Callable[..., Any] | None = None
    ) -> None:
        """From now on, call ``method`` in place of ``owner.name``, a function of a class or a module.

        After ``around(GradScaler, "step", step_scaler)``, a script's ``scaler.step(optimizer)`` is
        ``step_scaler(GradScaler.step, scaler, optimizer)``. The method calls the function that it gets, because it has
        something to do both before and after that, and returns the function's result. Calls that are not observed, such
        as those of torch itself in another thread, go to the function as before. ``in_worker`` is such a method for the
        calls in the forked workers of a DataLoader.
        """
        original = getattr(owner, name)
        names = positional_names(original)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if self.observes_call():
                in_order, rest = by_position(names, args, kwargs)
                return method(original, *in_order, **rest)
            if in_worker is not None and self.observes_worker():
                return in_worker(original, *args, **kwargs)
            return original(*args, **kwargs)

        self.replace(owner, name, replacement)

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace the function ``owner.name`` until ``remove``. The owner is a class or a module."""
        original = getattr(owner, name)
        is_class = isinstance(owner, type)
        is_inherited = is_class and name not in vars(owner)
        setattr(owner, name, replacement)
        if is_inherited:  # without its own attribute, the class has its parent's again
            self.undo.append(functools.partial(delattr, owner, name))
        else:
            self.undo.append(functools.partial(setattr, owner, name, original))
        if not is_class:
            self.functions[id(original)] = ReplacedFunction(original, replacement)

    def replace_copies(self) -> None:
        """Replace the functions also in modules that have imported them, as by ``from torch.x import f``.

        Such an import copies the reference to the function, so ``f`` stays the original there. Methods need nothing,
        because they are looked up in their class at each call.
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


@dataclass
class RunningEpoch:
    """What is known of one loop over a loader while it runs."""

    indices: list[int] = field(default_factory=list)  # a checksum of each batch's indices, as in ``record``
    record: Epoch | None = None  # None until iter(loader) has returned
    compares_workers: bool = False  # whether the batches that workers yield of a stream are to be compared
    stream_batches: list[int] = field(default_factory=list)  # their checksums so far


class WorkerPipe:
    """A pipe by which a loader's workers tell the training process which random numbers their batches drew.

    A worker is a fork of the training process, so it has inherited the pipe. It sends one message for each batch: a
    checksum of the batch's indices, and the batch's ``random_draws`` (see Epoch). Neither end ever waits for the other.
    """

    MESSAGE = struct.Struct("qQ")  # two integers of 64 bits

    def __init__(self) -> None:
        """Open the pipe, before any worker is forked."""
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        os.set_blocking(self.write_end, False)
        self.messages_sent = 0  # by this process, if it is a worker
        # {checksum of a batch's indices: its random_draws}. Two loaders may have batches of the same indices, so there
        # is a list of them.
        self.received: dict[int, list[int]] = {}

    def send(self, indices_checksum: int, random_draws: int) -> None:
        """In a worker: send the message of one batch. If the pipe is full, the message is lost."""
        self.messages_sent += 1
        try:
            # A pipe takes so few bytes as a whole or not at all.
            os.write(self.write_end, self.MESSAGE.pack(indices_checksum, random_draws))
        except BlockingIOError:  # the pipe is full
            pass

    def take(self, indices_checksum: int) -> int:
        """In the training process: the random_draws of a batch with these indices, or 0 if no worker has sent them.

        Each message is taken once.
        """
        self.receive()
        waiting = self.received.get(indices_checksum, [])
        if not waiting:
            return 0
        return waiting.pop(0)

    def receive(self) -> None:
        """In the training process: read all messages that workers have sent so far."""
        while True:
            try:
                messages = os.read(self.read_end, MOST_BATCHES * self.MESSAGE.size)
            except BlockingIOError:  # the pipe is empty
                return
            for indices_checksum, random_draws in self.MESSAGE.iter_unpack(messages):
                self.received.setdefault(indices_checksum, []).append(random_draws)

    def close(self) -> None:
        """Close both ends."""
        os.close(self.read_end)
        os.close(self.write_end)


class LoaderObserver:
    """Records which indices each DataLoader gives out, and whether its batches are trained on or evaluated.

    An epoch here is one loop over a loader: it begins when ``iter(loader)`` makes an iterator, and ends when this one
    has no batch left. Several may run at once, so what is known of one is kept by its iterator.
    """

    def __init__(self, record: Record, patches: Patches) -> None:
        """From now on, observe all loaders. ``record`` gets their epochs, and findings."""
        self.record = record
        self.patches = patches

        # {a loader: its number in the record}. A number is never used again, even if its loader is gone.
        self.loader_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.next_loader_number = itertools.count()
        # {the iterator of a loader: what is known of its loop}
        self.running: weakref.WeakKeyDictionary[Any, RunningEpoch] = weakref.WeakKeyDictionary()

        # A checksum of the random states from which the latest batch drew numbers; 0 if it drew none. The pipe carries
        # it from a worker that has loaded a batch.
        self.random_draws = 0
        self.worker_pipe = WorkerPipe()

        # The epoch of a batch that the loop has got and with which it has not yet called a model. The first call shows
        # whether the batch is trained on or evaluated.
        self.epoch_of_unused_batch: Epoch | None = None
        # The epoch of the batch that was trained on last. The next step of an optimizer is counted for it.
        self.epoch_of_training: Epoch | None = None
        # The evaluation that ended last, if a sampler repeated samples in it and no training has followed. Its results
        # may still be added up.
        self.padded_evaluation: Epoch | None = None

        self.replace_methods()

    def replace_methods(self) -> None:
        """Let the methods below be called where torch's loaders work, and where an evaluation adds up its results."""
        iterator_class = dataloader_module._BaseDataLoaderIter
        self.patches.after(DataLoader, "__iter__", self.begin_epoch)
        self.patches.before(iterator_class, "_reset", self.forget_epoch)
        self.patches.after(iterator_class, "_next_index", self.record_indices)
        self.patches.around(iterator_class, "__next__", self.next_batch)
        self.patches.around(_MapDatasetFetcher, "fetch", self.fetch, in_worker=self.fetch_in_worker)
        self.patches.after(dist, "all_reduce", self.find_padding)
        self.patches.after(dist, "reduce", self.find_padding)

    def close(self) -> None:
        """Close the pipe to the workers, when nothing is observed any more."""
        self.worker_pipe.close()

    # --- loading a batch

    def fetch(self, original: Callable[..., Any], fetcher: Any, indices: Any) -> Any:
        """Replaces ``fetcher.fetch(indices)``, which loads the samples of a batch: keep what it draws at random.

        The random states are compared before and after. ``original`` is torch's method.
        """
        self.random_draws = 0
        states_before = self.patches.run(random_states, fetcher.dataset)
        batch = original(fetcher, indices)
        if states_before is not None:  # None if random_states has failed
            self.patches.run(self.keep_random_draws, states_before, fetcher.dataset)
        return batch

    def keep_random_draws(self, states_before: dict[str, int], dataset: Any) -> None:
        """After a batch was loaded: keep from which random states it drew, which are those that have changed.

        ``states_before`` are the ``random_states`` before the batch was loaded.
        """
        states_after = random_states(dataset)
        changed_states = [state for name, state in states_before.items() if states_after.get(name) != state]
        self.random_draws = combined(changed_states)

    def fetch_in_worker(self, original: Callable[..., Any], fetcher: Any, indices: Any) -> Any:
        """In a worker, replaces ``fetcher.fetch(indices)``: send what it draws to the process that trains.

        A worker has a copy of this observer, made when it was forked.
        """
        if self.worker_pipe.messages_sent >= MOST_BATCHES:
            return original(fetcher, indices)
        batch = self.fetch(original, fetcher, indices)
        self.patches.run(self.send_random_draws, indices)
        return batch

    def send_random_draws(self, indices: Any) -> None:
        """In a worker that has loaded a batch of these indices: send what the batch has drawn at random."""
        self.worker_pipe.send(crc(indices), self.random_draws)

    # --- an epoch, from beginning to end

    def begin_epoch(self, iterator: Any, loader: Any) -> None:
        """After ``iter(loader)`` has made an iterator: begin the record of an epoch.

        It says what the loader and its sampler are like. By that the rules judge whether the ranks should get different
        samples, and whether the next epoch should have another order.
        """
        if loader not in self.loader_numbers:
            self.loader_numbers[loader] = next(self.next_loader_number)
        is_stream = isinstance(loader.dataset, IterableDataset)
        number_of_samples = 0
        if not is_stream and hasattr(loader.dataset, "__len__"):
            number_of_samples = len(loader.dataset)
        sampler = sampler_of(loader)
        # A loader with workers asks for the first indices before iter(loader) returns, and so before this method runs.
        running = self.running.setdefault(iterator, RunningEpoch())
        running.record = Epoch(
            loader=self.loader_numbers[loader],
            code_line=user_code_line(),
            dataset=dataset_checksum(loader.dataset),
            samples=number_of_samples,
            sampler=type(sampler).__name__,
            divided=isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1,
            shuffled=bool(getattr(sampler, "shuffle", False)),
            sampler_epoch=getattr(sampler, "epoch", -1),
            padded_length=padded_length(sampler, number_of_samples),
            indices=running.indices,
        )
        self.record.epochs.append(running.record)
        running.compares_workers = is_stream and loader.num_workers > 1

    def forget_epoch(self, iterator: Any, *args: Any, **kwargs: Any) -> None:
        """Before an iterator begins anew, as with persistent workers: its next batches are those of another epoch."""
        self.running.pop(iterator, None)

    def epoch_of(self, iterator: Any) -> Epoch | None:
        """The record of the loop that an iterator makes, or None if the loop began before the observation."""
        running = self.running.get(iterator)
        if running is None:
            return None
        return running.record

    def record_indices(self, indices: Any, iterator: Any) -> None:
        """Record a checksum of one batch's indices, which the sampler has just given to the iterator of a loader.

        By these checksums the rules see whether two ranks, or two epochs, got the same samples in the same order.
        """
        if indices is None:  # a stream has no indices
            return
        running = self.running.setdefault(iterator, RunningEpoch())
        if len(running.indices) < MOST_BATCHES:
            running.indices.append(crc(indices))

    def next_batch(self, original: Callable[..., Any], iterator: Any) -> Any:
        """Replaces ``next(iterator)``: record the batch that the training loop gets, or the end of the epoch.

        ``original`` is torch's method, which returns the batch, or raises StopIteration after the last one.
        """
        try:
            batch = original(iterator)
        except StopIteration:
            self.patches.run(self.end_epoch, iterator)
            raise
        self.patches.run(self.record_batch, iterator, batch)
        return batch

    def record_batch(self, iterator: Any, batch: Any) -> None:
        """After the training loop got a batch: record its size, and from which random states loading it drew.

        Whether the batch is trained on or evaluated shows only when a model is called, so its epoch waits for that.
        """
        epoch = self.epoch_of(iterator)
        self.epoch_of_unused_batch = epoch
        if epoch is None:
            return
        if len(epoch.random_draws) < MOST_BATCHES:
            if iterator._num_workers > 0:
                epoch.random_draws.append(self.draws_in_worker(epoch))
            else:
                epoch.random_draws.append(self.random_draws)
            epoch.rows = max(epoch.rows, most_rows(list(tensors_in(batch))))
        if self.running[iterator].compares_workers:
            self.check_stream(iterator, batch, epoch)

    def draws_in_worker(self, epoch: Epoch) -> int:
        """The random_draws of the batch that an epoch has just got from a worker, or 0 if they are not known."""
        batch_number = len(epoch.random_draws)  # from 0: the batches before it have theirs already
        if batch_number >= len(epoch.indices):  # the batch has no indices, because it is a stream's
            return 0
        return self.worker_pipe.take(epoch.indices[batch_number])

    def check_stream(self, iterator: Any, batch: Any, epoch: Epoch) -> None:
        """After a batch of a stream: find workers of which each yields the whole stream, and not a part of its own.

        Then every sample is trained on several times. A loader takes one batch from each worker in turn, which is a
        round. If each worker yields the whole stream, the batches of a round are equal. A stream of equal batches is no
        mistake, so the batches also have to change from round to round.
        """
        rounds_to_compare = 3
        number_of_workers = iterator._num_workers
        running = self.running[iterator]
        batches = running.stream_batches
        batches.append(combined(checksums(list(tensors_in(batch)))))
        if len(batches) < rounds_to_compare * number_of_workers:
            return
        running.compares_workers = False  # later batches of this epoch are not looked at

        rounds = [batches[first : first + number_of_workers] for first in range(0, len(batches), number_of_workers)]
        each_round_is_equal = all(equal(batches_of_round) for batches_of_round in rounds)
        rounds_differ = len(set(batches)) == rounds_to_compare
        if each_round_is_equal and rounds_differ:
            sentence = f"All {number_of_workers} workers of this loader yield the same batches, one after the other."
            self.record.add_finding("stream_repeated", epoch.code_line, sentence)

    def end_epoch(self, iterator: Any) -> None:
        """At the end of a loop over a loader: remember it if it was an evaluation that got repeated samples.

        ``find_padding`` then sees whether its results are added up with the repeated samples.
        """
        epoch = self.epoch_of(iterator)
        if epoch is None:
            return
        is_evaluation = epoch.batches_evaluated > 0 and epoch.steps == 0
        if is_evaluation and epoch.padded_length >= FEWEST_SAMPLES:
            self.padded_evaluation = epoch

    # --- what is done with the batches

    def model_called(self, model: str, with_gradients: bool) -> None:
        """At a model's first call after a batch: record whether the batch is trained on or evaluated.

        ``model`` is the model's name in the record, such as "DDP Net 1". ``with_gradients`` says whether gradients are
        recorded, as in training.
        """
        epoch = self.epoch_of_unused_batch
        if epoch is None:
            return
        self.epoch_of_unused_batch = None
        if not with_gradients:
            epoch.batches_evaluated += 1
            return
        self.epoch_of_training = epoch
        self.padded_evaluation = None
        if model not in epoch.models:
            epoch.models.append(model)

    def optimizer_steps(self) -> None:
        """Before a step of an optimizer: count it for the epoch whose batch it was trained on."""
        if self.epoch_of_training is not None:
            self.epoch_of_training.steps += 1

    def find_padding(self, result: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        """After ``all_reduce(tensor)`` or ``reduce``: find an evaluation that counts repeated samples.

        A DistributedSampler repeats some samples, so that all ranks get equally many. It is certain that an evaluation
        counts them if it adds up a number that is that of all samples with the repeated ones. For example 64, if 2
        ranks evaluate 63 samples. ``result`` is what the collective has returned.
        """
        epoch = self.padded_evaluation
        if epoch is None:  # no such evaluation has just ended
            return
        is_metric = isinstance(tensor, torch.Tensor) and tensor.numel() <= LARGEST_METRIC
        if not is_metric:
            return
        is_asynchronous = result is not None  # then it is a Work, and the tensor is not yet filled
        if is_asynchronous:
            return
        values = local_part(tensor).flatten().tolist()
        if epoch.padded_length in values:
            repeated = epoch.padded_length - epoch.samples
            sentence = (
                f"The evaluation counts {epoch.padded_length} samples of {epoch.samples}: the DistributedSampler "
                f"of the loop in line {epoch.code_line.line} gives {repeated} of them twice."
            )
            self.record.add_finding("counted_twice", user_code_line(), sentence)
            self.padded_evaluation = None


def sampler_of(loader: Any) -> Any:
    """The sampler that decides the order of a DataLoader's samples, or None.

    A loader that makes batches has it inside its batch sampler. One that the script itself has written may have none.
    """
    if loader.batch_sampler is None:
        return loader.sampler
    return getattr(loader.batch_sampler, "sampler", None)


def padded_length(sampler: Any, samples: int) -> int:
    """How many samples all ranks get with those that the sampler repeats, or 0 if it repeats none.

    A DistributedSampler repeats some of the dataset's ``samples`` if they cannot be divided evenly among the ranks,
    unless it was told to drop the rest. For example, 2 ranks get 64 of 63 samples, 32 each.
    """
    if not isinstance(sampler, DistributedSampler):
        return 0
    repeats_samples = not sampler.drop_last and sampler.total_size != samples
    if not repeats_samples:
        return 0
    return sampler.total_size


# --- observing scalers, clipping and schedulers -----------------------------------------------------------------------
# In which order they and the optimizers are called. The observer keeps the calls since the last step of an optimizer.


@dataclass(frozen=True)
class Clip:
    """A call of clip_grad_norm_ or clip_grad_value_ that has changed gradients."""

    parameters: set[int]  # the ids of the parameters whose gradients are clipped
    code_line: CodeLine


@dataclass
class ObservedScaler:
    """A GradScaler, and what the script was seen to do with it."""

    scaler: Any
    has_scaled_loss: bool = False
    has_stepped: bool = False  # whether scaler.step(optimizer) was called
    scale_was_read: bool = False  # by scaler.get_scale(), after which the script may divide the gradients itself
    step_with_scaled_gradients: CodeLine | None = None  # the last optimizer.step() outside scaler.step(optimizer)

    def is_scaling(self) -> bool:
        """Whether it certainly has multiplied the gradients, and nobody but its ``unscale_`` divides them again."""
        if not self.has_scaled_loss or self.scale_was_read:
            return False
        scale = self.scaler._scale  # a tensor, or None before it is needed
        return scale is not None and value_of(scale) != 1.0

    def has_unscaled(self, optimizer: Any) -> bool:
        """Whether ``scaler.unscale_(optimizer)`` was called since the last step.

        A scaler keeps a stage for each optimizer: READY, until the optimizer's gradients are divided by the scale.
        """
        state = self.scaler._per_optimizer_states.get(id(optimizer))
        return state is not None and state["stage"].name != "READY"


@dataclass(frozen=True)
class ObservedScheduler:
    """A learning-rate scheduler, and in which order it and its optimizer step.

    The scheduler should step after the optimizer: otherwise the first learning rate is never used.
    """

    scheduler: Any
    first_step: CodeLine
    # Who stepped, in order: "optimizer" or "scheduler". It begins with "unknown" if earlier steps were not observed.
    order: list[str]


class ScalerObserver:
    """Records in which order a GradScaler, clipping, optimizers and schedulers are called.

    A GradScaler multiplies the loss, and with it the gradients, by a scale, and divides them by it before the step.
    Gradients that are clipped, or applied, before they are divided are many times too large.
    """

    def __init__(self, record: Record, patches: Patches) -> None:
        """From now on, observe all scalers, clipping and schedulers. ``record`` gets the findings."""
        self.record = record
        self.patches = patches
        self.scalers: dict[int, ObservedScaler] = {}  # {id of a GradScaler: what is known of it}
        self.schedulers: dict[int, ObservedScheduler] = {}  # {id of a scheduler: what is known of it}
        self.stepped_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.clips: list[Clip] = []  # since the last step of an optimizer
        self.is_in_scaler_step = False  # whether scaler.step(optimizer) runs, which calls optimizer.step()
        self.scheduler_depth = 0  # how many scheduler.step() run: a SequentialLR calls those of others in its own
        self.replace_methods()

    def replace_methods(self) -> None:
        """Let the methods below be called where a script uses scalers, clipping and schedulers."""
        self.patches.before(GradScaler, "scale", self.scale)
        self.patches.before(GradScaler, "get_scale", self.read_scale)
        self.patches.around(GradScaler, "step", self.step_scaler)
        self.patches.around(nn.utils, "clip_grad_norm_", self.clip)
        self.patches.around(nn.utils, "clip_grad_value_", self.clip)
        for scheduler_class in vars(lr_scheduler).values():
            if isinstance(scheduler_class, type) and "step" in vars(scheduler_class):
                self.patches.around(scheduler_class, "step", self.step_scheduler)

    def observed(self, scaler: Any) -> ObservedScaler:
        """What is known of a GradScaler."""
        if id(scaler) not in self.scalers:
            self.scalers[id(scaler)] = ObservedScaler(scaler)
        return self.scalers[id(scaler)]

    def scale(self, scaler: Any, outputs: Any) -> None:
        """Before ``scaler.scale(loss)``: record that the scaler is in use."""
        if scaler.is_enabled():
            self.observed(scaler).has_scaled_loss = True

    def read_scale(self, scaler: Any) -> None:
        """Before ``scaler.get_scale()``: record it if the script's own code asks, and not the scaler itself."""
        is_called_by_script = caller_in_torch() == ""
        if is_called_by_script:
            self.observed(scaler).scale_was_read = True

    def clip(self, original: Callable[..., Any], parameters: Any, limit: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces ``clip_grad_norm_(parameters, limit)`` and ``clip_grad_value_``: record what is clipped.

        ``original`` is torch's function. Its result, which is the gradients' norm or None, is returned.
        """
        if not isinstance(parameters, torch.Tensor):
            parameters = list(parameters)  # a generator yields them once, and they are needed twice
        norm = original(parameters, limit, *args, **kwargs)
        self.patches.run(self.record_clip, parameters, limit, norm)
        return norm

    def record_clip(self, parameters: Any, limit: Any, norm: Any) -> None:
        """Record which gradients were clipped, unless their norm was only measured, or was below the limit.

        ``norm`` is what torch's function returned: the norm for clip_grad_norm_, None for clip_grad_value_.
        """
        limit = float(limit)
        only_measures = limit == float("inf")  # a usual way to get the norm without a change
        if only_measures:
            return
        # A DTensor's norm is not looked at, because its value would take a collective.
        norm_is_known = isinstance(norm, torch.Tensor) and not isinstance(norm, DTensor)
        if norm_is_known and value_of(norm) <= limit:
            return
        clipped = {id(parameter) for parameter in tensors_in(parameters)}
        self.clips.append(Clip(clipped, user_code_line()))

    def step_scaler(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces ``scaler.step(optimizer)``: check the clipping before it, and mark that the scaler's step runs.

        ``original`` is torch's method, which calls ``optimizer.step()``. By the mark ``optimizer_steps`` below knows
        that it is the scaler that calls, and not the script itself.
        """
        self.patches.run(self.before_scaler_step, scaler, optimizer)
        self.is_in_scaler_step = True
        try:
            return original(scaler, optimizer, *args, **kwargs)
        finally:
            self.is_in_scaler_step = False

    def before_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """Before ``scaler.step(optimizer)``: record the step, and check the clipping since the last step."""
        self.record_order(optimizer)
        observed = self.observed(scaler)
        observed.has_stepped = True
        if observed.is_scaling() and not observed.has_unscaled(optimizer):
            self.find_scaled_clips(scaler, optimizer)
        self.clips = []

    def find_scaled_clips(self, scaler: Any, optimizer: Any) -> None:
        """Find gradients of this optimizer that were clipped while they were multiplied by the scaler's scale.

        The limit of the clipping is meant for the gradients themselves, and the scaled ones are thousands of times as
        large.
        """
        parameters = {id(parameter) for parameter in parameters_of(optimizer)}
        for clip in self.clips:
            clips_this_optimizer = not clip.parameters.isdisjoint(parameters)
            if clips_this_optimizer:
                scale = value_of(scaler._scale)
                sentence = f"The gradients are clipped while they are still multiplied by the loss scale, {scale:g}."
                self.record.add_finding("clipped_while_scaled", clip.code_line, sentence)

    def optimizer_steps(self, optimizer: Any) -> None:
        """Before ``optimizer.step()``: record the line if the script calls it itself, with gradients that are scaled.

        It becomes a finding only in ``close``, because the script may yet show that it divides the gradients itself.
        """
        if self.is_in_scaler_step:
            return
        self.clips = []
        self.record_order(optimizer)
        for observed in self.scalers.values():
            if observed.is_scaling() and not observed.has_unscaled(optimizer):
                observed.step_with_scaled_gradients = user_code_line()

    def step_scheduler(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces ``scheduler.step()``: record the script's own calls.

        A scheduler may be made of others, whose ``step`` it calls within its own. Such calls do not count;
        ``scheduler_depth`` says how deep they are. ``original`` is the method of the scheduler's class.
        """
        is_called_by_script = self.scheduler_depth == 0
        if is_called_by_script:
            self.patches.run(self.scheduler_steps, scheduler)
        self.scheduler_depth += 1
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            self.scheduler_depth -= 1

    def scheduler_steps(self, scheduler: Any) -> None:
        """Before ``scheduler.step()``: add the step to the order in which the scheduler and its optimizer step.

        Only an order that begins with the training's very first step shows a mistake. Any other begins with "unknown".
        """
        steps_made = getattr(scheduler, "_step_count", 0)
        is_being_built = steps_made == 0  # or it is of a class that counts no steps
        if is_being_built:
            return
        if id(scheduler) in self.schedulers:
            self.schedulers[id(scheduler)].order.append("scheduler")
            return

        # This is the first step that is observed. torch has counted one already, made by the scheduler's constructor.
        is_first_after_building = steps_made == 1 and scheduler.last_epoch == 0
        optimizer = scheduler.optimizer
        # torch sets _opt_called in the first step of an optimizer that has a scheduler.
        optimizer_has_stepped = optimizer in self.stepped_optimizers or getattr(optimizer, "_opt_called", False)
        if is_first_after_building and not optimizer_has_stepped:
            order = ["scheduler"]
        else:
            order = ["unknown"]
        self.schedulers[id(scheduler)] = ObservedScheduler(scheduler, user_code_line(), order)

    def record_order(self, optimizer: Any) -> None:
        """Before an optimizer's step: add it to the order of each scheduler that changes its learning rates."""
        self.stepped_optimizers.add(optimizer)
        for observed in self.schedulers.values():
            if observed.scheduler.optimizer is optimizer:
                observed.order.append("optimizer")

    def close(self) -> None:
        """At the end of the observation: add the findings that were not certain before."""
        self.find_steps_with_scaled_gradients()
        self.find_schedulers_before_optimizers()

    def find_steps_with_scaled_gradients(self) -> None:
        """Find scripts that scale the loss, but call ``optimizer.step()`` and not ``scaler.step(optimizer)``.

        It is certain if the scaler never makes a step, and the script never asks for the scale to divide by it.
        """
        for observed in self.scalers.values():
            code_line = observed.step_with_scaled_gradients
            if code_line is None or observed.has_stepped or observed.scale_was_read:
                continue
            sentence = "optimizer.step() applies gradients that are still multiplied by the loss scale."
            self.record.add_finding("wrong_order", code_line, sentence)

    def find_schedulers_before_optimizers(self) -> None:
        """Find schedulers that step before their optimizer, and do so three times from the first step on."""
        wrong_order = ["scheduler", "optimizer"] * 3
        for observed in self.schedulers.values():
            if observed.order[: len(wrong_order)] == wrong_order:
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
    """A call of ``load_state_dict(state, strict=False)``."""

    has_match: bool  # whether the module has any of the keys that ``state`` has
    code_line: CodeLine
    example: str  # such as "it has weight, and was given module.weight"


class StateObserver:
    """Records loads that fill nothing, ties between weights that break, and files that ranks write.

    Weights are tied if several attributes of modules hold one parameter. A tie is the list of these attributes; it is
    kept when the attributes get other parameters, because they should again be one.
    """

    def __init__(self, record: Record, patches: Patches, steps_made: Callable[[], int]) -> None:
        """From now on, observe what a script registers as parameters, loads and saves.

        ``record`` gets the saves, and findings. ``steps_made()`` is how many optimizer steps this rank has made.
        """
        self.record = record
        self.steps_made = steps_made
        # {id of a parameter: the attributes that hold it}. The parameter itself, or a weak reference to it, cannot be
        # the key, because torch.utils.swap_tensors refuses a parameter that has a weak reference.
        self.attributes: dict[int, list[Attribute]] = {}
        self.ties: list[list[Attribute]] = []
        # {checksum of the keys of a state dictionary: the loads that were given these keys}
        self.loads: dict[int, list[Load]] = {}
        self.is_loading = False  # whether a load_state_dict runs, which may register parameters
        self.replace_methods(patches)

    def replace_methods(self, patches: Patches) -> None:
        """Let the methods below be called where a script registers parameters, loads and saves."""
        patches.before(nn.Module, "register_parameter", self.register)
        patches.before(nn.Module, "load_state_dict", self.load)
        patches.after(nn.Module, "load_state_dict", self.loaded)
        patches.after(dcp, "load", self.load_distributed)
        patches.before(torch, "save", self.save)

    def register_existing(self, modules: Iterable[nn.Module]) -> None:
        """Register the parameters of modules that were built before the observation began."""
        for module in modules:
            for name, parameter in module._parameters.items():
                self.register(module, name, parameter)

    def register(self, module: nn.Module, name: str, parameter: Any) -> None:
        """When ``module.name`` becomes a parameter: find the other attributes of modules that hold the same parameter.

        Weights are tied if several attributes hold one parameter, as an embedding and the head of a language model may.
        The list of these attributes is then a tie. A third attribute joins the list that is there.
        """
        if not self.is_loading:
            self.forget_ties_of(module, name)  # the script itself assigns a parameter, so it decides what is tied
        if not isinstance(parameter, nn.Parameter):
            return
        attributes = self.attributes.get(id(parameter), [])
        is_known_parameter = any(attribute.parameter() is parameter for attribute in attributes)
        if not is_known_parameter:
            # There are none yet, or they held an earlier parameter that had the same id, and is gone.
            attributes = []
        attributes.append(Attribute(owner=weakref.ref(module), name=name))
        self.attributes[id(parameter)] = attributes
        if len(attributes) == 2:  # with three it is in ``ties`` already
            self.ties.append(attributes)

    def forget_ties_of(self, module: nn.Module, name: str) -> None:
        """Take the attribute ``module.name`` out of the ties that it is in."""
        for tie in self.ties:
            for attribute in list(tie):  # a copy, because the loop changes the tie
                is_this_one = attribute.owner() is module and attribute.name == name
                if is_this_one:
                    tie.remove(attribute)

    def load(self, module: nn.Module, state: Any, strict: bool = True, *args: Any, **kwargs: Any) -> None:
        """Before ``module.load_state_dict(state)``: with strict=False, record whether the module has any of its keys.

        A module that has none is not a finding yet, because a script may try one ``state`` on several modules in turn:
        see ``close``.
        """
        self.is_loading = True
        if strict:  # then torch itself raises an error
            return
        # module.state_dict() is not called for its keys, because its hooks may communicate.
        own_keys = {name for name, _ in module.named_parameters()}
        own_keys |= {name for name, _ in module.named_buffers()}
        if not own_keys or not state:
            return
        given_keys = sorted(state)
        load = Load(
            has_match=not own_keys.isdisjoint(given_keys),
            code_line=user_code_line(),
            example=f"it has {min(own_keys)}, and was given {given_keys[0]}",
        )
        self.loads.setdefault(crc(given_keys), []).append(load)

    def loaded(self, result: Any, *args: Any, **kwargs: Any) -> None:
        """After ``load_state_dict``: from now on it is again the script that registers parameters."""
        self.is_loading = False

    def load_distributed(self, result: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        """After ``dcp.load(state, checkpoint_id=…)``: find what the load left out without an error.

        dcp.load fills the tensors that ``state`` has, and does not mention what else the checkpoint holds.
        """
        folder = kwargs.get("checkpoint_id")
        if folder is None or not os.path.isdir(folder):
            return
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        saved_keys = set(saved)
        saved_tensors = {key for key, value in saved.items() if isinstance(value, TensorMetadata)}
        asked_tensors = {key for key, value in flat(state) if isinstance(value, torch.Tensor)}
        self.find_empty_optimizers(state, saved_keys)
        self.find_tensors_left_out(asked_tensors, saved_tensors)
        # Only a planner that allows a partial load lets keys be missing. Otherwise dcp.load itself raises an error.
        allows_missing_keys = getattr(kwargs.get("planner"), "allow_partial_load", False)
        if allows_missing_keys:
            self.find_empty_load(asked_tensors, saved_keys)

    def find_empty_load(self, asked_keys: set[str], saved_keys: set[str]) -> None:
        """Find a load that has filled nothing, because the checkpoint has none of the tensors' keys.

        ``asked_keys`` are the keys of the tensors that were loaded into, such as "model.head.weight", and
        ``saved_keys`` those of all that the checkpoint holds.
        """
        if asked_keys and asked_keys.isdisjoint(saved_keys):
            sentence = (
                f"Not one tensor was loaded: {min(asked_keys)} was asked for, and the checkpoint has {min(saved_keys)}."
            )
            self.record.add_finding("nothing_restored", user_code_line(), sentence)

    def find_tensors_left_out(self, asked: set[str], saved_tensors: set[str]) -> None:
        """Find parts of a load, such as "model", of which the checkpoint holds more tensors than were asked for.

        ``asked`` are the keys of the tensors that were loaded into, such as "model.head.weight", and ``saved_tensors``
        those of the tensors in the checkpoint. A part that was not asked for at all, such as "optimizer", is never
        named. The finding is only a note, because a script may leave tensors out on purpose, as to train another head.
        """
        asked_parts = {first_part(key) for key in asked}
        left_out = [key for key in saved_tensors - asked if first_part(key) in asked_parts]
        something_was_loaded = not asked.isdisjoint(saved_tensors)
        if not left_out or not something_was_loaded:
            return
        example = min(left_out)
        if len(left_out) == 1:
            sentence = f"The checkpoint also holds {example}, which was not asked for, so it was not loaded."
        else:
            sentence = f"The checkpoint also holds {len(left_out)} tensors that were not asked for, such as {example}."
        mistake = make_finding("nothing_restored", user_code_line(), (), sentence)
        self.record.findings.append(replace(mistake, is_note=True))

    def find_empty_optimizers(self, state: dict[str, Any], saved_keys: set[str]) -> None:
        """Find an optimizer's state dictionary without moments, into which a checkpoint with moments was loaded.

        ``state`` is what was loaded into, such as {"model": {…}, "optimizer": {"state": {}, "param_groups": […]}}.
        ``saved_keys`` are the keys of all that the checkpoint holds, such as "optimizer.state.weight.exp_avg".
        """
        for name, part in state.items():
            is_optimizer = isinstance(part, dict) and "param_groups" in part
            if not is_optimizer:
                continue
            has_place_for_moments = bool(part.get("state"))
            moments_are_saved = any(key.startswith(f"{name}.state.") for key in saved_keys)
            if moments_are_saved and not has_place_for_moments:
                sentence = (
                    f"The checkpoint holds the optimizer's moments, and {name!r} has no place for them: "
                    "the state of an optimizer that has made no step is empty."
                )
                self.record.add_finding("nothing_restored", user_code_line(), sentence)

    def save(self, value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        """Before ``torch.save(value, file)``: record the first time that a path is written to.

        The rules then see whether several ranks write one file, and whether it is rank 0 that saves the model.
        """
        if not isinstance(file, (str, os.PathLike)):  # it may be an open file, or memory
            return
        if os.fspath(file).startswith("/dev/"):  # such as /dev/null, which all ranks may write to
            return
        path = os.path.realpath(file)
        save = Save(steps_made=self.steps_made(), code_line=user_code_line())
        self.record.saves.setdefault(path, save)

    def broken_ties(self, model: nn.Module) -> Iterator[str]:
        """Yields the names of weights of a model that were tied, and are no longer: "head.weight and wte.weight".

        A tie is a list of attributes of modules that once held one parameter. It is broken if they hold several now.
        """
        path_of_module = {module: path for path, module in model.named_modules()}  # the model's own path is ""
        for tie in self.ties:
            # {each parameter that the tie has now: the first attribute that holds it}
            names: dict[nn.Parameter, str] = {}
            for attribute in tie:
                module = attribute.owner()
                parameter = attribute.parameter()
                if parameter is None:  # the attribute is gone
                    continue
                if module not in path_of_module:  # it belongs to another model
                    continue
                full_name = f"{path_of_module[module]}.{attribute.name}".lstrip(".")
                names.setdefault(parameter, full_name)
            if len(names) > 1:
                yield " and ".join(names.values())

    def close(self) -> None:
        """At the end of the observation: find state dictionaries that matched no module.

        A script may try one on several modules in turn, so it is a mistake only if none of them had any of its keys.
        """
        for loads in self.loads.values():
            some_module_matched = any(load.has_match for load in loads)
            if not some_module_matched:
                sentence = f"load_state_dict(strict=False) matched no key of the module: {loads[0].example}."
                self.record.add_finding("nothing_loaded", loads[0].code_line, sentence)


def first_part(key: str) -> str:
    """The part of a checkpoint to which a key belongs: "model" for "model.head.weight"."""
    return key.partition(".")[0]


def flat(state: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the (key, value) pairs of nested dictionaries, whose keys are joined with dots, as DCP names them.

    For {"model": {"weight": w}, "step": 3} it yields ("model.weight", w) and ("step", 3).
    """
    for key, value in state.items():
        full_key = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from flat(value, prefix=f"{full_key}.")
        else:
            yield full_key, value


# --- observing communication ------------------------------------------------------------------------------------------
# What the script's own code sends, since it may average gradients, weights or metrics itself. The observer keeps from
# where in memory tensors were sent since the last step.


class CommunicationObserver:
    """Records whether the script's own code sends tensors: large ones like gradients, or small ones like metrics."""

    # The names of all collectives, first as methods of dist.ProcessGroup, then as functions of
    # torch.distributed._functional_collectives:
    COLLECTIVE_METHODS = (
        "allreduce allreduce_coalesced broadcast reduce scatter gather gather_single allgather allgather_coalesced "
        "_allgather_base all_gather_single all_gather_single_coalesced allgather_into_tensor_coalesced reduce_scatter "
        "_reduce_scatter_base reduce_scatter_single reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced "
        "alltoall alltoall_base all_to_all_single send recv recv_anysource"
    ).split()
    FUNCTIONAL_COLLECTIVES = (
        "broadcast all_reduce all_gather_single all_gather_single_autograd reduce_scatter_single all_gather_tensor "
        "reduce_scatter_single_autograd all_gather_tensor_autograd reduce_scatter_tensor all_to_all_single "
        "reduce_scatter_tensor_autograd all_reduce_coalesced all_to_all_single_autograd permute_tensor "
        "all_gather_into_tensor_coalesced reduce_scatter_tensor_coalesced"
    ).split()
    # The folders of torch whose collectives are not the script's own: those of DDP, SyncBatchNorm, fully_shard,
    # checkpoints, ZeroRedundancyOptimizer and DTensors.
    PARTS_OF_TORCH = (
        "nn/parallel/",
        "nn/modules/",
        "distributed/fsdp/",
        "distributed/_composable/",
        "distributed/checkpoint/",
        "distributed/optim/",
        "distributed/tensor/",
    )

    def __init__(self, record: Record, patches: Patches, when_script_sends: Callable[[], None]) -> None:
        """From now on, observe each collective of this rank, such as ``dist.all_reduce(loss)``.

        If the script's own code calls one, and not a part of torch such as DDP, the sizes of its tensors go into
        ``record``, and ``when_script_sends()`` is called.
        """
        self.record = record
        self.when_script_sends = when_script_sends
        self.sent_addresses: set[int] = set()  # data_ptr() of each tensor that was sent since the last optimizer step
        self.replace_collectives(patches)

    def replace_collectives(self, patches: Patches) -> None:
        """Let the two methods below be called before each collective, with its arguments.

        torch has two families of them:
        - Functions such as dist.all_reduce call a method of the process group, here ProcessGroup.allreduce.
        - Functional collectives, which return their result as a new tensor, do not call these methods.
        """
        for method_name in self.COLLECTIVE_METHODS:
            if hasattr(dist.ProcessGroup, method_name):  # not every version of torch has all of them
                patches.before(dist.ProcessGroup, method_name, self.before_group_collective)

        functional_collectives = sys.modules["torch.distributed._functional_collectives"]
        for function_name in self.FUNCTIONAL_COLLECTIVES:
            if hasattr(functional_collectives, function_name):
                patches.before(functional_collectives, function_name, self.before_functional_collective)

    def before_group_collective(self, group: Any, *args: Any, **kwargs: Any) -> None:
        """Observe a collective of a process group, whose method is about to be called with these arguments."""
        has_other_ranks = group.size() > 1
        if has_other_ranks:
            self.record_tensors(list(tensors_in([args, kwargs])))

    def before_functional_collective(self, *args: Any, **kwargs: Any) -> None:
        """Observe a functional collective, which is about to be called with these arguments."""
        self.record_tensors(list(tensors_in([args, kwargs])))

    def record_tensors(self, tensors: list[torch.Tensor]) -> None:
        """Record the sizes and addresses of tensors that a collective sends, if the script's own code calls it.

        The rules are silent where a script may average gradients, weights or metrics itself. So large tensors are
        recorded apart from small ones, which can only be metrics unless a parameter has their size.
        """
        is_called_by_torch = caller_in_torch().startswith(self.PARTS_OF_TORCH)
        if is_called_by_torch:
            return
        for tensor in tensors:
            # Functions such as all_gather_object send Python objects as bytes.
            is_small_object = tensor.dtype == torch.uint8 and tensor.numel() < LARGEST_OBJECT
            if tensor.numel() <= LARGEST_METRIC or is_small_object:
                self.record.sizes_of_small_tensors.add(tensor.numel())
            else:
                self.record.sends_large_tensors = True
            if len(self.sent_addresses) < MOST_ADDRESSES:
                self.sent_addresses.add(local_part(tensor).data_ptr())
        self.when_script_sends()


# --- observing models, and the whole training -------------------------------------------------------------------------
# TrainingObserver has the other observers, and sees the calls of models, the backward passes and the steps. It keeps
# what was called so far, and by how much calls are nested.

OTHER_LIBRARIES = {"horovod", "deepspeed", "mpi4py", "colossalai", "bagua", "ray"}  # they communicate without torch


@dataclass(eq=False)
class ObservedModel:
    """A module that the training loop calls, and how it was called so far."""

    module: nn.Module
    description: Model
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
        return self.description.wrapper == "FSDP"


def describe_model(module: nn.Module) -> Model:
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


@dataclass
class RunningCalls:
    """What runs at this moment on the rank. Calls may run inside each other, so they are counted."""

    module_calls: int = 0
    backward_passes: int = 0
    ddp: list[nn.Module] = field(default_factory=list)  # the DistributedDataParallel modules whose forward runs
    optimizer: Any = None  # the optimizer whose step runs


@dataclass
class RandomNumbers:
    """What the current call of a model draws at random."""

    state_before: int = 0  # a checksum of the random state before the call
    has_dropped: bool = False  # whether a dropout has drawn numbers


class TrainingObserver:
    """Observes the training of one rank for ``steps`` steps of an optimizer; ``record`` has what it saw."""

    def __init__(self, steps: int) -> None:
        """Nothing is observed before ``start``. The observation ends when an optimizer has made ``steps`` steps."""
        self.steps = steps
        self.record = Record()
        self.patches = Patches(self.record)
        self.store: Any = None  # of the process group
        self.is_finished = False
        self.step_hooks: list[Any] = []  # handles of the hooks of optimizers, by which they are removed

        # What the script has made:
        self.models: dict[int, ObservedModel] = {}  # {id of a module: what is known of it as a model}
        self.optimizers: dict[int, ObservedOptimizer] = {}  # {id of an optimizer: what is known of it}
        # {an optimizer: the line that has built it}
        self.built_at: weakref.WeakKeyDictionary[Any, CodeLine] = weakref.WeakKeyDictionary()
        # {a module inside DDP: a reference to the DistributedDataParallel}
        self.wrapper_of: weakref.WeakKeyDictionary[nn.Module, weakref.ref] = weakref.WeakKeyDictionary()

        # What the script does now:
        self.running = RunningCalls()
        self.random_numbers = RandomNumbers()
        self.evaluation: Evaluation | None = None  # None while the model is trained

    def start(self, note_existing: bool = True) -> None:
        """Begin to observe. ``note_existing``: look for the modules that the script has built already."""
        self.loaders = LoaderObserver(self.record, self.patches)
        self.scalers = ScalerObserver(self.record, self.patches)
        self.states = StateObserver(self.record, self.patches, steps_made=lambda: len(self.record.steps))
        self.communication = CommunicationObserver(self.record, self.patches, when_script_sends=self.communicated)
        self.replace_functions()
        if note_existing:
            self.find_existing_modules()
        self.step_hooks = [
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ]

    def replace_functions(self) -> None:
        """Replace the functions of torch that none of the four other observers has replaced."""
        self.wrap_module_calls()
        self.patches.around(torch.autograd, "backward", self.run_backward)
        self.patches.around(torch.autograd, "grad", self.run_backward)
        self.patches.after(Optimizer, "__init__", self.optimizer_built)
        self.patches.after(DistributedDataParallel, "__init__", self.ddp_built)
        self.patches.before(torch.Tensor, "item", self.read_number)
        self.patches.replace_copies()  # last, because it copies the replacements of all observers

    def find_existing_modules(self) -> None:
        """Find the modules that were built before the observation began: all that are in this process's memory."""
        # isinstance() would read each object's __class__, at which a lazy object may begin to work. type() does not.
        modules = [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]
        self.patches.run(self.states.register_existing, modules)
        for module in modules:
            if isinstance(module, DistributedDataParallel):
                self.patches.run(self.observed, module)

    def remove_hooks(self) -> None:
        """Remove the hooks of optimizers.

        ``stop`` leaves them, because it may be called by one of them, while torch iterates over its hooks.
        """
        for hook in self.step_hooks:
            hook.remove()
        self.step_hooks = []

    def stop(self) -> None:
        """End the observation, and complete the record. The hooks of optimizers stay until ``remove_hooks``."""
        if self.is_finished:
            return
        self.is_finished = True
        self.patches.remove()
        self.patches.run(self.loaders.close)

        # Findings that were not certain before the end:
        self.patches.run(self.scalers.close)
        self.patches.run(self.states.close)
        self.patches.run(self.find_idle_optimizers)
        self.complete_record()

        # The rest of the training may be long, and references to models and optimizers would keep their memory.
        self.models.clear()
        self.optimizers.clear()
        del self.loaders, self.scalers, self.states, self.communication

    def complete_record(self) -> None:
        """At the end of the observation: record this rank's number, host and device, and name the rank in findings."""
        record = self.record
        script_had_a_group = self.store is not None  # it was seen then, and the script may have ended it since
        if dist.is_initialized():
            self.see_group()
        elif not script_had_a_group:
            record.rank = int(os.environ.get("RANK", 0))
        record.host = socket.gethostname()
        if torch.cuda.is_available():
            record.device = torch.cuda.get_device_name()
        else:
            record.device = torch.backends.cpu.get_cpu_capability()
        uses_other_library = not OTHER_LIBRARIES.isdisjoint(sys.modules)
        if uses_other_library:
            record.sends_large_tensors = True  # it may send what this check cannot see
        findings = without_repetitions(record.findings)
        record.findings = [replace(finding, ranks=(record.rank,)) for finding in findings]

    def see_group(self) -> None:
        """Record this rank's number in the process group, and keep the group's store for the exchange of the records.

        It is called as early as there is a group, because the script may end its group before the check ends.
        """
        self.record.rank = dist.get_rank()
        self.record.world_size = dist.get_world_size()
        self.store = distributed_c10d._get_default_store()

    # --- calls of modules

    def wrap_module_calls(self) -> None:
        """Replace ``nn.Module.__call__``, with which every module is called, to observe the calls of models."""
        original = nn.Module.__call__

        @functools.wraps(original)
        def replacement(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # While a graph is compiled, or a checkpointed part is recomputed in backward, the script calls no model.
            is_recomputed = self.running.backward_passes > 0
            if torch.compiler.is_compiling() or is_recomputed or not self.patches.observes_call():
                return original(module, *args, **kwargs)
            return self.call_module(original, module, args, kwargs)

        self.patches.replace(nn.Module, "__call__", replacement)

    def call_module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replaces ``module(*args, **kwargs)``: record the call if the module is a model, or a dropout inside one.

        A model is a module that no other module calls, or DDP, which may be inside another. ``original`` is torch's
        method, which runs the module's forward. Modules call each other, so this method runs within itself.
        """
        inner = uncompiled(module)
        is_ddp = isinstance(inner, DistributedDataParallel)
        is_called_by_script = self.running.module_calls == 0
        is_model = is_called_by_script or is_ddp
        self.running.module_calls += 1
        forward = None  # the record of this call, if it gets one
        if is_model:
            forward = self.patches.run(self.before_model, inner, args, kwargs)
        elif self.wrapper_of:
            self.patches.run(self.check_wrapper, module)
        if is_ddp:
            self.running.ddp.append(inner)
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0
        try:
            output = original(module, *args, **kwargs)
            if is_dropout:
                self.patches.run(self.record_dropout, args, output)
            if forward is not None:
                self.patches.run(self.after_model, inner, forward)
            return output
        finally:
            self.running.module_calls -= 1
            if is_ddp:
                self.running.ddp.pop()

    def observed(self, module: nn.Module) -> ObservedModel | None:
        """What is known of a module as a model, or None for a module without parameters, such as a loss."""
        known = self.models.get(id(module))
        if known is None:
            return self.observe(module)
        was_wrapped_since = isinstance(module, FSDPModule) and not known.description.wrapper
        if was_wrapped_since:  # by fully_shard, which changes the module's parameters
            return self.observe(module)
        return known

    def observe(self, module: nn.Module) -> ObservedModel | None:
        """Describe a module and keep the description, unless the module has no parameters."""
        has_parameters = len(list(module.parameters())) > 0
        if not has_parameters:
            return None
        if isinstance(module, DistributedDataParallel):
            for part in module.module.modules():
                self.wrapper_of[part] = weakref.ref(module)  # with it ``check_wrapper`` finds calls that go past DDP
        model = ObservedModel(module, describe_model(module))
        self.models[id(module)] = model
        return model

    def give_name(self, model: ObservedModel) -> None:
        """When the training first uses a model, give it a name, such as "DDP Net 1" for the first Net inside DDP.

        By its name a model of one rank is compared with that of another. The name is the same on all ranks that use
        their models in the same order.
        """
        if model.name:
            return
        class_name = type(model.unwrapped()).__name__
        name_without_number = f"{model.description.wrapper} {class_name}".strip()
        earlier = [name for name in self.record.models if name.startswith(f"{name_without_number} ")]
        model.name = f"{name_without_number} {len(earlier) + 1}"
        self.record.models[model.name] = model.description

    def before_model(self, module: nn.Module, args: Any, kwargs: Any) -> Forward | None:
        """Before ``module(*args, **kwargs)`` in the training loop: count the call, and begin a Forward, its record.

        Returns the Forward, which ``after_model`` completes, for a call with gradients and for the first call of an
        evaluation. An evaluation begins when a model in eval mode is called without gradients, and ends with the next
        call with gradients. Returns None for other calls, and for a module without parameters, such as a loss.
        """
        self.check_wrapper(module)
        model = self.observed(module)
        if model is None:
            return None
        self.give_name(model)
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
        """Begin the record of a call ``model(*args, **kwargs)``: the line that calls, and a checksum of the inputs.

        The random state is kept as well. If a dropout in the model then draws numbers, it draws them from this state.
        """
        inputs = list(tensors_in([args, kwargs]))
        forward = Forward(
            model=model.name,
            code_line=user_code_line(),
            inputs=combined(checksums(inputs)),
            elements=sum(tensor.numel() for tensor in inputs),
            rows=most_rows(inputs),
        )
        first_parameter = next(model.module.parameters())
        self.random_numbers = RandomNumbers(state_before=random_state(first_parameter.device))
        return forward

    def after_model(self, module: nn.Module, forward: Forward) -> None:
        """After a call of a model: complete the Forward that ``before_model`` has begun, and add it to the record."""
        if not torch.is_grad_enabled():
            self.record_evaluation(module, forward)
            return
        if self.random_numbers.has_dropped:
            forward.dropout_state = self.random_numbers.state_before
        self.record.forwards.append(forward)

    def count_call(self, model: ObservedModel, with_gradients: bool) -> None:
        """Before a call of a model: count it, if the call or the backward pass after it communicates with other ranks.

        All ranks have to make such calls equally often, or they wait for each other, so the counts are compared at the
        end. ``with_gradients`` says whether gradients are recorded, so that a backward pass is to follow.
        """
        calls = model.calls
        is_ddp = isinstance(model.module, DistributedDataParallel)
        if is_ddp:
            join_config: Any = model.module._join_config  # of torch's Join, inside which ranks may make fewer calls
            if join_config.enable:
                model.description.is_in_join = True
        if not model.communicates(with_gradients):
            is_in_no_sync = is_ddp and with_gradients
            if is_in_no_sync:  # a mistake, if this is the last call before a step
                calls.line_in_no_sync = user_code_line()
            return
        if with_gradients:
            calls.to_average += 1
            calls.line_in_no_sync = None
            calls.synchronized = True
            model.waits_for_backward = True
        else:
            calls.to_broadcast += 1
        code_line = user_code_line()
        if code_line not in calls.code_lines:
            calls.code_lines.append(code_line)

    def check_wrapper(self, module: nn.Module) -> None:
        """Before a call of a module inside DDP: record the line if it is not DDP that leads to the call.

        DDP's own forward prepares the averaging of gradients, so after a call past it nothing is averaged.
        """
        ddp_reference = self.wrapper_of.get(module)
        if ddp_reference is None:  # the module is not inside DDP
            return
        ddp = ddp_reference()
        if ddp is None or ddp in self.running.ddp:
            return
        if not torch.is_grad_enabled():  # there is nothing to average
            return
        calls = self.models[id(ddp)].calls
        if calls.line_past_wrapper is None:
            calls.line_past_wrapper = user_code_line()

    def record_dropout(self, args: Any, output: Any) -> None:
        """After a dropout: record that it drew random numbers and, on tensor-parallel ranks, checksums of what it did.

        Tensor-parallel ranks hold the same activation, so each has to drop the same units of it. If the activation is a
        DTensor, torch sees to that. ``args`` are the dropout's arguments, of which the first is its input.
        """
        self.random_numbers.has_dropped = True
        ranks = self.tensor_parallel_ranks
        if not ranks or not torch.is_grad_enabled():
            return
        if len(self.record.dropouts) >= MOST_DROPOUTS:
            return
        activation = args[0]
        if isinstance(activation, DTensor) or isinstance(output, DTensor):
            return
        input_checksum, output_checksum = checksums([activation, output])
        dropout = Dropout(user_code_line(), ranks, input=input_checksum, output=output_checksum)
        self.record.dropouts.append(dropout)

    @functools.cached_property
    def tensor_parallel_ranks(self) -> tuple[int, ...]:
        """The ranks among which a model's matrices are divided for tensor parallelism, such as (0, 1), or () for none.

        fully_shard makes DTensors, too, but divides them among the ranks that average their gradients. So the ranks of
        a mesh's last dimension are tensor-parallel if some of them do not average this model's gradients.
        """
        for model in self.models.values():
            ranks_that_average = set(model.description.data_ranks)
            for parameter in model.module.parameters():
                if isinstance(parameter, DTensor):
                    ranks = ranks_of_last_dimension(parameter)
                    if not ranks_that_average.issuperset(ranks):
                        return ranks
        return ()

    def record_evaluation(self, module: nn.Module, forward: Forward) -> None:
        """After the first call of an evaluation: record what the model evaluates, and with which batch statistics.

        Ranks with different statistics give results that depend on which rank evaluates what. So a model without
        BatchNorm has no such record, and only the first evaluations of a model have one. In any case
        ``self.evaluation`` says that an evaluation is going on.
        """
        statistics = batch_statistics(module)
        earlier = [evaluation for evaluation in self.record.evaluations if evaluation.model == forward.model]
        is_recorded = len(statistics) > 0 and len(earlier) < MOST_EVALUATIONS

        parameters = list(module.parameters())
        is_sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        checksum_of_weights = 0
        if is_recorded and not is_sharded:
            checksum_of_weights = combined(checksums(parameters))
        checksums_of_statistics = checksums(list(statistics.values()))
        self.evaluation = Evaluation(
            model=forward.model,
            number=len(earlier),
            code_line=forward.code_line,
            inputs=forward.inputs,
            weights=checksum_of_weights,
            buffers=dict(zip(statistics, checksums_of_statistics, strict=True)),
        )
        if is_recorded:
            self.record.evaluations.append(self.evaluation)

    # --- backward, and numbers that are read

    def run_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces ``torch.autograd.backward`` and ``torch.autograd.grad``: count the backward passes of each model.

        In a backward pass DDP and FSDP average the gradients of the models that were called before it. How often they
        did is the same on all ranks, so it numbers the steps by which the ranks are compared. ``original`` is torch's
        function.
        """
        self.running.backward_passes += 1
        try:
            return original(*args, **kwargs)
        finally:
            self.running.backward_passes -= 1
            for model in self.models.values():
                if model.waits_for_backward:
                    model.waits_for_backward = False
                    model.calls.averaged += 1

    def read_number(self, tensor: torch.Tensor) -> None:
        """Before ``tensor.item()``: record the line if it reads a loss, which is a number that has a gradient.

        Only what the script reads itself counts: by item(), or by float(loss), whose method ``__float__`` in torch's
        file _tensor.py calls item().
        """
        is_loss = tensor.dim() == 0 and tensor.grad_fn is not None
        if not is_loss:  # it is decided first, because to look for the caller takes longer
            return
        is_read_by_script = caller_in_torch() in ("", "_tensor.py")
        code_line = user_code_line()
        if is_read_by_script and code_line not in self.record.loss_reads:
            self.record.loss_reads.append(code_line)

    def communicated(self) -> None:
        """When the script's own code sends a tensor: record whether it does so in a forward, or for an evaluation.

        A model that communicates in its forward, as with experts, may rightly get the same batch on several ranks.
        After an evaluation, sending is taken for adding up the ranks' results.
        """
        is_in_forward = self.running.module_calls > 0 and self.running.backward_passes == 0
        if is_in_forward:
            for model in self.models.values():
                model.description.communicates = True
        if self.evaluation is not None:
            self.evaluation.reduced = True

    # --- steps of optimizers

    def ddp_built(self, result: Any, ddp: nn.Module, *args: Any, **kwargs: Any) -> None:
        """After a DistributedDataParallel was built: learn which modules are inside it, before they are called."""
        self.observed(ddp)

    def optimizer_built(self, result: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """After an optimizer was built: keep the line, for a finding that it was built too early."""
        self.built_at[optimizer] = user_code_line()

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """torch calls this before each step of any optimizer, with the step's arguments."""
        if self.is_finished or torch.compiler.is_compiling() or not self.patches.observes_call():
            return
        # A ZeroRedundancyOptimizer has another optimizer inside, whose step runs within its own and does not count.
        outer_optimizer = self.running.optimizer
        is_nested = outer_optimizer is not None and outer_optimizer is not optimizer
        if not is_nested:
            self.patches.run(self.begin_step, optimizer)

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """torch calls this after each step of any optimizer. After the last step to observe, the observation ends."""
        if optimizer is not self.running.optimizer:  # its step was not observed
            return
        self.running.optimizer = None
        self.patches.run(self.optimizers[id(optimizer)].end, self)
        latest_step = self.record.steps[-1]
        if latest_step.number >= self.steps:
            self.stop()

    def begin_step(self, optimizer: Any) -> None:
        """Before a step of an optimizer: tell the other observers, and begin the record of the step."""
        if dist.is_initialized() and self.store is None:
            self.see_group()
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = ObservedOptimizer(optimizer, index=len(self.optimizers))
        observed = self.optimizers[id(optimizer)]
        observed.name_parameters(self)
        self.running.optimizer = optimizer
        self.scalers.optimizer_steps(optimizer)
        self.loaders.optimizer_steps()
        observed.steps += 1
        observed.begin(self)

    def find_idle_optimizers(self) -> None:
        """At the end: find optimizers whose steps change nothing.

        Either an optimizer was built before the model's parameters were replaced, and holds the old ones, or something
        keeps every gradient from its parameters.
        """
        for observed in self.optimizers.values():
            code_line = self.built_at.get(observed.optimizer, observed.code_line)
            class_name = type(observed.optimizer).__name__
            stale = self.stale_parameters(observed)
            if stale:
                names_without_optimizer = list(self.parameters_without_optimizer().values())
                sentence = (
                    f"{len(stale)} parameters of this {class_name} are not the model's, so its steps "
                    f"change nothing: {names_without_optimizer[0]} of the model is in no optimizer."
                )
                self.record.add_finding("stale_optimizer", code_line, sentence)
            elif observed.never_got_a_gradient():
                sentence = f"{observed.steps} steps of this {class_name} found no gradient at any of its parameters."
                self.record.add_finding("no_gradient", code_line, sentence)

    def stale_parameters(self, observed: "ObservedOptimizer") -> list[Any]:
        """The stale parameters of an optimizer: those that the model replaced after the optimizer was built.

        This happens if fully_shard is called after the optimizer was built. The optimizer then updates the old
        parameters, and no optimizer has the new ones. Two signs show it:

        - The optimizer has parameters that are in no model and never had a gradient.
        - Their shapes are, in order, those of the models' parameters that no optimizer has. (That works for shards,
          too, because a DTensor's shape is that of the whole parameter.)

        The result is empty if the shapes differ, because there may be another cause then.
        """
        parameters_of_models = self.trained_parameters()
        candidates = []
        for parameter in observed.parameters():
            # A parameter that had a gradient was in a model in use, so it was not replaced before the training.
            had_gradient = id(parameter) in observed.with_gradient
            if parameter not in parameters_of_models and not had_gradient:
                candidates.append(parameter)

        old_shapes = [parameter.shape for parameter in candidates]
        new_shapes = [parameter.shape for parameter in self.parameters_without_optimizer()]
        if old_shapes == new_shapes:
            return candidates
        return []

    def parameters_without_optimizer(self) -> dict[nn.Parameter, str]:
        """The parameters that are trained, but that no optimizer has, each with its name in its model."""
        optimized_ids: set[int] = set()
        for observed in self.optimizers.values():
            optimized_ids |= {id(parameter) for parameter in observed.parameters()}
        trained = self.trained_parameters()
        return {parameter: name for parameter, name in trained.items() if id(parameter) not in optimized_ids}

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


def ranks_of_last_dimension(parameter: DTensor) -> tuple[int, ...]:
    """The ranks among which a DTensor is divided along the last dimension of its mesh, with this rank.

    By convention this is the dimension of tensor parallelism.
    """
    mesh = parameter.device_mesh
    group = mesh.get_group(mesh.ndim - 1)
    return tuple(dist.get_process_group_ranks(group))


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
    """An optimizer, which records what its steps start from and what they leave.

    A parameter has a key, such as "DDP Net 1: weight", under which its checksums are recorded. The key is the same on
    all ranks, so that their checksums can be compared.
    """

    def __init__(self, optimizer: Any, index: int) -> None:
        """Made before the optimizer's first step. ``index``: which of the rank's optimizers it is, from 0."""
        self.optimizer = optimizer
        self.index = index
        self.models: list[ObservedModel] = []  # the models that have its parameters
        self.keys: dict[int, str] = {}  # {a parameter's id: its key in the record}
        self.with_gradient: set[int] = set()  # the ids of the parameters that ever had a gradient
        self.unsynchronized = False  # whether a step came while FSDP held gradients that were not reduced
        self.steps = 0  # how many it has made
        self.step: Step | None = None  # the record of the latest
        self.code_line = user_code_line()  # of its first step

    def parameters(self) -> list[Any]:
        """The optimizer's parameters now, in order: a script may add some later."""
        return parameters_of(self.optimizer)

    def name_parameters(self, observer: TrainingObserver) -> None:
        """Before a step: give each parameter that has none a key, and describe the parameter in the record.

        A key is made of the name of the model that has the parameter and of the parameter's name there, such as
        "DDP Net 1: weight". If no known model has the parameter, the key is such as "SGD 0: parameter 3".
        """
        if all(id(parameter) in self.keys for parameter in self.parameters()):
            return
        models = possible_owners(observer)
        find_broken_ties(models, observer)
        owned_parameters = parameters_by_id(models)
        for number, parameter in enumerate(self.parameters()):
            if id(parameter) in self.keys:
                continue
            owned = owned_parameters.get(id(parameter))
            if owned is not None:
                observer.give_name(owned.model)
                key = f"{owned.model.name}: {owned.name}"
                description = describe_parameter_of_model(parameter, owned.name, owned.model)
                if owned.model not in self.models:
                    self.models.append(owned.model)
            else:
                owner = f"{type(self.optimizer).__name__} {self.index}"
                name = f"parameter {number}"
                key = f"{owner}: {name}"
                description = describe_parameter(parameter, name, owner)
            self.keys[id(parameter)] = key
            observer.record.parameters[key] = description

    def never_got_a_gradient(self) -> bool:
        """Whether it is certain that something keeps all gradients from the optimizer, over several steps."""
        if not type(self.optimizer).__module__.startswith("torch.optim"):
            return False  # an optimizer of another library may compute its updates without gradients
        if self.unsynchronized:
            return False  # fully_shard holds gradients because it was told not to reduce them, which is another mistake
        has_made_several_steps = self.steps >= 3
        return has_made_several_steps and len(self.with_gradient) == 0

    def remember_gradients(self) -> None:
        """Add the parameters that have a gradient now to those that ever had one."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                self.with_gradient.add(id(parameter))

    def begin(self, observer: TrainingObserver) -> None:
        """Before a step: record how the models were called since the last one, and checksums of what it starts from."""
        self.remember_gradients()
        step = Step(
            optimizer=self.index,
            number=self.steps,
            code_line=user_code_line(),
            learning_rates=learning_rates_of(self.optimizer),
            settings=settings_of(self.optimizer),
            calls={},
        )
        for model in self.models:
            # The step gets a copy, because the counts go on.
            step.calls[model.name] = replace(model.calls, code_lines=[*model.calls.code_lines])
            self.check_sharded_gradients(model.module, step.code_line, observer)
            # What is recorded of the calls between two steps begins anew.
            model.calls.synchronized = False
            model.calls.line_in_no_sync = None
            model.calls.line_past_wrapper = None

        parameters = self.parameters()
        is_first_step = self.steps == 1
        if is_first_step:
            step.weights_before = self.checksums_of(parameters)
        self.record_averaging_by_hand(observer)
        if self.is_sampled(observer.steps):
            step.gradients = self.checksums_of([parameter.grad for parameter in parameters])
            step.gradient_means = self.gradient_means(observer.record)
        self.step = step
        observer.record.steps.append(step)

    def record_averaging_by_hand(self, observer: TrainingObserver) -> None:
        """Before a step: record whether the script has sent each gradient since the last step, as to average them.

        A script that averages gradients by hand sends each of them from where it is in memory. So the addresses of what
        was sent are compared with those of the gradients, and then forgotten.
        """
        sent_addresses = observer.communication.sent_addresses
        gradient_addresses = set()
        for parameter in self.parameters():
            if parameter.grad is not None:
                gradient_addresses.add(local_part(parameter.grad).data_ptr())
        if gradient_addresses and gradient_addresses.issubset(sent_addresses):
            observer.record.averages_gradients = True
        sent_addresses.clear()

    def end(self, observer: TrainingObserver) -> None:
        """After a step: record checksums of the weights."""
        self.remember_gradients()  # a closure may have made them within the step
        if self.step is not None and self.is_sampled(observer.steps):
            self.step.weights_after = self.checksums_of(self.parameters())

    def is_sampled(self, last: int) -> bool:
        """Whether checksums are recorded at this step: at steps 1, 2, 4, 8, … and at ``last``, the last one observed.

        Checksums of all weights take time. Weights that differ once stay different, so a few steps are enough.
        """
        is_power_of_two = self.steps.bit_count() == 1
        return is_power_of_two or self.steps == last

    def checksums_of(self, tensors: Sequence[Any]) -> dict[str, int]:
        """{a parameter's key: the checksum of its tensor}. ``tensors`` has one for each parameter, in their order."""
        keys = [self.keys[id(parameter)] for parameter in self.parameters()]
        return dict(zip(keys, checksums(tensors), strict=True))

    def gradient_means(self, record: Record) -> dict[str, float]:
        """The mean absolute value of each DTensor parameter's gradient: {key of the parameter: mean}.

        Ranks that hold a replica of a parameter each compute its gradient anew. Rounding may change some bits of it,
        and so its checksum, but it hardly changes the mean. So the rules compare means.
        """
        means: dict[str, float] = {}
        for parameter in self.parameters():
            gradient = parameter.grad
            key = self.keys[id(parameter)]
            if gradient is None or record.parameters[key].kind != "DTensor":
                continue
            if is_to_be_summed(gradient):
                continue
            own_part = local_part(gradient).detach()
            sum_of_sizes: Any = own_part.float().abs().sum().tolist()
            number_of_elements = max(1, own_part.numel())  # a rank may hold none, and the mean is then 0
            means[key] = sum_of_sizes / number_of_elements
        return means

    def check_sharded_gradients(self, module: nn.Module, code_line: CodeLine, observer: TrainingObserver) -> None:
        """Before a step: find gradients that fully_shard has not reduced, because the script told it not to.

        fully_shard keeps them where no optimizer sees them, so the step goes without them. ``code_line`` is the line of
        the step.
        """
        if self.unsynchronized:  # it is reported already
            return
        for group in parameter_groups(module):
            if any(holds_unreduced_gradient(fsdp_parameter) for fsdp_parameter in group.fsdp_params):
                self.unsynchronized = True
        if self.unsynchronized:
            sentence = "The optimizer steps while fully_shard holds gradients that it has not reduced."
            observer.record.add_finding("not_synchronized", code_line, sentence)


def is_to_be_summed(gradient: torch.Tensor) -> bool:
    """Whether a gradient is a DTensor that is still to be summed over ranks, so that each rank has its own summand."""
    if not isinstance(gradient, DTensor):
        return False
    return any(placement.is_partial() for placement in gradient.placements)


def possible_owners(observer: TrainingObserver) -> list[ObservedModel]:
    """The models that may have an optimizer's parameters: those inside DDP, and then all others that were called.

    A model may be known both by itself and inside DDP. Because those inside DDP come first, its parameters are theirs.
    """
    in_ddp = []
    called_others = []
    for model in observer.models.values():
        was_called = model.name != ""
        if model.description.wrapper == "DDP":
            in_ddp.append(model)
        elif was_called:
            called_others.append(model)
    return [*in_ddp, *called_others]


def parameters_by_id(models: Sequence[ObservedModel]) -> dict[int, OwnedParameter]:
    """Which model has which parameter: {id of the parameter: the first model that has it, and its name there}."""
    owned: dict[int, OwnedParameter] = {}
    for model in models:
        for name, parameter in model.unwrapped().named_parameters():
            owned.setdefault(id(parameter), OwnedParameter(model, name))
    return owned


def find_broken_ties(models: Sequence[ObservedModel], observer: TrainingObserver) -> None:
    """Find weights of these models that were tied when the model was built, and are several parameters now."""
    for model in models:
        for names in observer.states.broken_ties(model.unwrapped()):
            sentence = f"{names} were one parameter when the model was built, and are two now."
            observer.record.add_finding("untied", user_code_line(), sentence)


def holds_unreduced_gradient(fsdp_parameter: Any) -> bool:
    """Whether fully_shard keeps a gradient of the whole parameter, which it has not reduced to the ranks' shards."""
    if getattr(fsdp_parameter, "unsharded_accumulated_grad", None) is not None:
        return True
    whole = getattr(fsdp_parameter, "_unsharded_param", None)  # up to PyTorch 2.14 the gradient stays there
    return getattr(whole, "grad", None) is not None


def parameters_of(optimizer: Any) -> list[Any]:
    """The parameters of all groups of an optimizer, in order."""
    parameters: list[Any] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def learning_rates_of(optimizer: Any) -> tuple[float, ...]:
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

    Ranks whose optimizers have different settings train models of their own on purpose, as in a search for the best
    settings.
    """
    left_out = ("params", "lr", "initial_lr", "param_names")
    settings = []
    for group in optimizer.param_groups:
        for name, value in group.items():
            is_plain = isinstance(value, (int, float, bool, str, tuple, type(None)))
            if is_plain and name not in left_out:
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
            for group in groups:
                if group is not None:
                    yield group


def mesh_ranks(module: nn.Module) -> tuple[int, ...]:
    """The ranks of the mesh on which fully_shard divides a module, or none if it has no parameters of its own."""
    groups = list(parameter_groups(module))
    if not groups:
        return ()
    device_mesh = groups[0].mesh_info.mesh
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


def describe_parameter_of_model(parameter: Any, name: str, model: ObservedModel) -> Parameter:
    """The record of an optimizer's parameter that a model has under this name."""
    if not isinstance(model.module, DistributedDataParallel):
        return describe_parameter(parameter, name, owner=model.name)
    size = local_part(parameter).numel()
    if is_averaged(model.module, name):
        return Parameter(model.name, name, kind="DDP", size=size, replicas=model.description.data_ranks)
    return Parameter(model.name, name, kind="not averaged by DDP", size=size, replicas=())


def describe_parameter(parameter: Any, name: str, owner: str) -> Parameter:
    """The record of an optimizer's parameter that is not inside DDP: its kind, and which ranks hold replicas of it.

    ``owner`` is the name of the model that has the parameter under this ``name``, or that of the optimizer if no known
    model has it.
    """
    size = local_part(parameter).numel()
    if not isinstance(parameter, DTensor):
        return Parameter(owner, name, kind="plain", size=size, replicas=())
    if is_on_mesh_of_one(parameter) and dist.get_world_size() > 1:
        kind = "mesh of one"
    else:
        kind = "DTensor"
    return Parameter(owner, name, kind=kind, size=size, replicas=replicas_of(parameter))


def is_on_mesh_of_one(parameter: DTensor) -> bool:
    """Whether the mesh of a DTensor has only one rank, and is no part of a larger mesh."""
    mesh = parameter.device_mesh
    if hasattr(mesh, "_get_root_mesh"):  # not every version has it
        mesh = mesh._get_root_mesh()
    return mesh.size() == 1


def is_averaged(ddp: DistributedDataParallel, name: str) -> bool:
    """Whether DDP certainly gives all ranks the same gradient of the parameter of this name.

    It does not for a parameter that it was told to ignore. A communication hook replaces DDP's own averaging, and only
    the hooks in AVERAGING_HOOKS are known to average, too.
    """
    if name in ddp.parameters_to_ignore:
        return False
    for hook, _ in getattr(ddp, "_comm_hooks", []):  # each hook comes with its state
        hook_name = getattr(hook, "__name__", "")
        if hook_name not in AVERAGING_HOOKS:
            return False
    return True


def replicas_of(parameter: DTensor) -> tuple[int, ...]:
    """The ranks that hold the same part of a DTensor as this rank, with itself: (0, 2). Empty if no other rank does.

    A mesh arranges the ranks in a grid. Along a dimension on which the DTensor is replicated, all ranks hold the same.
    Along the others it is divided, so a replica must be at this rank's own coordinate there.
    """
    mesh = parameter.device_mesh
    own_coordinate: Any = mesh.get_coordinate()
    index_of_replicas: list[Any] = []  # in the grid: a slice or a number for each dimension
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            index_of_replicas.append(slice(None))
        else:
            index_of_replicas.append(own_coordinate[dimension])
    grid = mesh.mesh  # a tensor of ranks
    ranks = tuple(grid[tuple(index_of_replicas)].flatten().tolist())
    if len(ranks) == 1:
        return ()
    return ranks


# --- comparing the ranks: what the rules share ------------------------------------------------------------------------
# ``compare`` gets the records of all ranks and asks each rule. A rule is a function from these records to findings. It
# keeps nothing, and is silent where it is not certain. ``RULES``, at the end, has them all.

# After these mistakes the ranks' weights drift apart. If one of them is found, "drift" is not reported beside it.
CAUSES_OF_DRIFT = ("different_noise", "uneven_steps", "different_start", "stale_optimizer")


def compare(records: Sequence[Record]) -> list[Finding]:
    """All findings of a check, from one record of each rank: those of single ranks, and those of the rules."""
    findings = findings_of_single_ranks(records)
    if len(records) > 1:
        for rule in RULES:
            findings += rule(records)
    cause_of_drift_is_known = any(finding.kind in CAUSES_OF_DRIFT for finding in findings)
    if cause_of_drift_is_known:
        findings = [finding for finding in findings if finding.kind != "drift"]
    return without_repetitions(findings)


def findings_of_single_ranks(records: Sequence[Record]) -> list[Finding]:
    """The findings that ranks made while they observed themselves.

    The same finding of several ranks becomes one finding that names them all.
    """
    ranks_of_finding: dict[Finding, set[int]] = {}  # {a finding without its ranks: the ranks that made it}
    for record in records:
        for finding in record.findings:
            without_ranks = replace(finding, ranks=())
            ranks_of_finding.setdefault(without_ranks, set()).update(finding.ranks)
    findings = []
    for without_ranks, ranks in ranks_of_finding.items():
        findings.append(replace(without_ranks, ranks=tuple(sorted(ranks))))
    return findings


def without_repetitions(findings: Iterable[Finding]) -> list[Finding]:
    """The findings in their order, each once. A line that runs in every step may have led to the same one each time."""
    return list(dict.fromkeys(findings))  # a dictionary keeps the order in which its keys came


def equal(values: Iterable[Any]) -> bool:
    """Whether all values are equal, such as what each rank has recorded of one thing."""
    values = list(values)
    return all(value == values[0] for value in values)


def is_wrapped(records: Sequence[Record]) -> bool:
    """Whether some model is wrapped, so that several ranks average its gradients.

    If so, unwrapped models are not judged: one may be a reference that each rank trains alone on purpose.
    """
    for record in records:
        for model in record.models.values():
            if len(model.data_ranks) > 1:
                return True
    return False


def sends_by_hand(records: Sequence[Record]) -> bool:
    """Whether the script's own code sends what may be gradients or weights, so that it may average them itself.

    Small tensors are taken for metrics, unless some parameter has their size.
    """
    for record in records:
        parameter_sizes = {parameter.size for parameter in record.parameters.values()}
        sent_size_of_a_parameter = not record.sizes_of_small_tensors.isdisjoint(parameter_sizes)
        if record.sends_large_tensors or sent_size_of_a_parameter:
            return True
    return False


def common_steps(records: Sequence[Record]) -> list[list[Step]]:
    """The optimizer steps that all these ranks made, in order. Each is a list: [rank 0's Step, rank 1's Step, …].

    Steps of different ranks belong together if they have the same number and are of the same optimizer.
    """
    if not records:
        return []
    steps_of_ranks = []  # for each rank: {(optimizer, number): the step}
    for record in records:
        steps_of_ranks.append({(step.optimizer, step.number): step for step in record.steps})
    common: list[list[Step]] = []
    for optimizer_and_number in steps_of_ranks[0]:
        if all(optimizer_and_number in steps for steps in steps_of_ranks):
            common.append([steps[optimizer_and_number] for steps in steps_of_ranks])
    return common


def initial_weights(record: Record) -> dict[str, int]:
    """{a parameter's key: its checksum before the first step of its optimizer}."""
    weights: dict[str, int] = {}
    for step in record.steps:
        weights |= step.weights_before
    return weights


def same_settings(records: Sequence[Record]) -> bool:
    """Whether the ranks' optimizers have equal settings in each step, as replicas of one training have.

    A search for the best settings gives each rank different ones.
    """
    for steps in common_steps(records):
        if not equal((step.learning_rates, step.settings) for step in steps):
            return False
    return True


def has_different_gpus(records: Sequence[Record]) -> bool:
    """Whether the ranks compute on devices of several kinds, such as an A100 and an H100."""
    return not equal(record.device for record in records)


def train_same_unwrapped_model(records: Sequence[Record], kind: str) -> bool:
    """Whether all ranks train the same unwrapped model: equal parameters, all of this kind, with equal settings.

    ``kind`` is "plain" for ordinary parameters, or "mesh of one", as in Parameter.
    """
    a_record_is_missing = len(records) < records[0].world_size
    if a_record_is_missing or is_wrapped(records):
        return False
    sizes_of_ranks = []  # for each rank: {a parameter's key: its number of elements}
    for record in records:
        if any(parameter.kind != kind for parameter in record.parameters.values()):
            return False
        sizes_of_ranks.append({key: parameter.size for key, parameter in record.parameters.items()})
    has_parameters = len(sizes_of_ranks[0]) > 0
    return has_parameters and equal(sizes_of_ranks) and same_settings(records)


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
    """Find replicas that differ: copies of a parameter that DDP, or a DTensor's mesh, keeps on several ranks.

    Replicas have to begin equal, and each step has to leave them equal. ``records`` has one Record of each rank.
    """
    if has_different_gpus(records):  # their rounding may differ
        return []
    findings = []
    for replicas in replicated_parameters(records):
        replica_records = records_with(replicas, records)
        if len(replica_records) < 2:
            continue
        if left_out_steps(replicas.model, replica_records):  # a rule of its own reports them: find_uneven_steps
            continue
        findings += compare_replicas(replicas, replica_records)
    return findings


@dataclass(frozen=True)
class Replicas:
    """Parameters of one model, given by their keys in the record, that should be equal on some ranks."""

    model: str
    ranks: tuple[int, ...]
    keys: list[str] = field(default_factory=list)


def compare_replicas(replicas: Replicas, replica_records: Sequence[Record]) -> list[Finding]:
    """The findings about one model's replicas. ``replica_records`` are the records of the ranks that hold them."""
    different_start = find_different_start_of_replicas(replicas, replica_records)
    if different_start is not None:
        return [different_start]
    kind = replica_records[0].parameters[replicas.keys[0]].kind
    if kind == "DTensor":
        return find_gradients_that_differ(replicas, replica_records)
    # A script that sends weights or gradients itself may want DDP's replicas to differ for some steps.
    script_may_average = any(record.sends_large_tensors for record in replica_records)
    if script_may_average:
        return []
    return explain_drift(replicas, replica_records)


def find_different_start_of_replicas(replicas: Replicas, replica_records: Sequence[Record]) -> Finding | None:
    """A finding if replicas differ before the first step, or None. ``replica_records`` are those of their ranks."""
    starts = [initial_weights(record) for record in replica_records]
    different_keys = []
    for key in replicas.keys:
        if not equal(start.get(key) for start in starts):
            different_keys.append(key)
    if not different_keys:
        return None
    code_line = replica_records[0].steps[0].code_line
    sentence = f"{names_of(different_keys)} differ on {listed(replicas.ranks)} before the first step."
    return make_finding("different_start", code_line, replicas.ranks, sentence)


def records_with(replicas: Replicas, records: Sequence[Record]) -> list[Record]:
    """The records of the ranks that hold these replicas."""
    first_key = replicas.keys[0]
    return [record for record in records if record.rank in replicas.ranks and first_key in record.parameters]


def replicated_parameters(records: Sequence[Record]) -> list[Replicas]:
    """Which parameters should be equal on which ranks: one Replicas for each model and each set of ranks."""
    groups: dict[tuple[str, tuple[int, ...]], Replicas] = {}  # {(model, ranks): the replicas}
    for record in records:
        for key, parameter in record.parameters.items():
            has_replicas = len(parameter.replicas) > 1
            if not has_replicas:
                continue
            model_and_ranks = (parameter.model, parameter.replicas)
            if model_and_ranks not in groups:
                groups[model_and_ranks] = Replicas(parameter.model, parameter.replicas)
            keys = groups[model_and_ranks].keys
            if key not in keys:
                keys.append(key)
    return list(groups.values())


def explain_drift(replicas: Replicas, replica_records: Sequence[Record]) -> list[Finding]:
    """One finding if replicas of a model inside DDP come to differ, with the reason if that is known; otherwise [].

    ``replica_records`` are the records of the ranks that hold the replicas.
    """
    drift = find_drift(replicas, replica_records)
    if drift is None:
        return []
    for steps in drift.suspects:
        reason = reason_to_drift(replicas, steps)
        if reason is not None:
            return [reason]
    last_suspect = drift.suspects[-1][0]
    sentence = (
        f"{names_of(drift.keys)} differ on {listed(replicas.ranks)} after step {last_suspect.number}, "
        "although DDP made them equal."
    )
    return [make_finding("drift", last_suspect.code_line, replicas.ranks, sentence)]


@dataclass(frozen=True)
class Drift:
    """Replicas were seen to differ. One of the steps since they were last seen to be equal has the mistake."""

    keys: list[str]  # of the parameters that differ
    suspects: list[list[Step]]  # those steps, each as a list: [rank 0's Step, rank 1's Step, …]


def find_drift(replicas: Replicas, replica_records: Sequence[Record]) -> Drift | None:
    """The first time that replicas of a model inside DDP are seen to differ, or None.

    Checksums of weights are recorded only after some steps, so several steps may lie between two comparisons.
    """
    suspects: list[list[Step]] = []  # the steps since the last comparison
    for steps in common_steps(replica_records):
        step_of_first_rank = steps[0]
        has_checksums = not step_of_first_rank.weights_after.keys().isdisjoint(replicas.keys)
        if has_checksums or replicas.model in step_of_first_rank.calls:
            suspects.append(steps)
        if has_checksums:
            different_keys = []
            for key in replicas.keys:
                if not equal(step.weights_after.get(key) for step in steps):
                    different_keys.append(key)
            if different_keys:
                return Drift(different_keys, suspects)
            suspects = []
    return None


def reason_to_drift(replicas: Replicas, steps: Sequence[Step]) -> Finding | None:
    """The mistake that makes DDP's replicas differ after one step, or None if none is known. Known are:

    - not_synchronized: the last call before the step is inside no_sync.
    - around_the_wrapper: the module inside DDP is called, and not DDP.
    - different_rates: the ranks have different learning rates.

    ``steps`` is what each rank has recorded of this one step: [rank 0's Step, rank 1's Step, …].
    """
    for step in steps:
        calls = step.calls[replicas.model]  # how this rank called the model before the step
        if calls.line_in_no_sync is not None:
            sentence = "The last call before optimizer.step() is inside no_sync: its gradients stay on their rank."
            return make_finding("not_synchronized", calls.line_in_no_sync, replicas.ranks, sentence)
        if calls.line_past_wrapper is not None and not calls.synchronized:
            sentence = "The module inside DDP is called here, not DDP: no gradient is averaged before the step."
            return make_finding("around_the_wrapper", calls.line_past_wrapper, replicas.ranks, sentence)
    if equal(step.learning_rates for step in steps):
        return None
    different_rates: list[str] = []  # in the order of ranks
    for step in steps:
        if step.learning_rates:
            rate = f"{step.learning_rates[0]:g}"  # of the first group of parameters, which is usually the only one
            if rate not in different_rates:
                different_rates.append(rate)
    sentence = (
        f"From step {steps[0].number} on, replicas use different learning rates: {' and '.join(different_rates)}."
    )
    return make_finding("different_rates", steps[0].code_line, replicas.ranks, sentence)


# Rounding, even to bfloat16, makes the means of two replicas' gradients differ by less than this part of the largest
# mean of all parameters. All parameters count, because a gradient that is small beside the others may be only rounding.
ROUNDING_OF_MEANS = 0.05


def find_gradients_that_differ(replicas: Replicas, replica_records: Sequence[Record]) -> list[Finding]:
    """Find replicas of a DTensor whose gradients differ between ranks by more than rounding explains.

    Each rank with a replica computes the gradient anew, and rounding changes its checksum. So mean absolute values of
    the gradients are compared. ``replica_records`` are the records of the ranks that hold the replicas.
    """
    for step_on_ranks in common_steps(replica_records):
        tolerance = ROUNDING_OF_MEANS * largest_gradient_mean(step_on_ranks)
        for key in replicas.keys:
            if not all(key in step.gradient_means for step in step_on_ranks):
                continue  # on some rank it has no gradient
            means = [step.gradient_means[key] for step in step_on_ranks]
            smallest = min(means)
            largest = max(means)
            if largest - smallest > tolerance:
                sentence = (
                    f"The gradient of {names_of([key])} differs on {listed(replicas.ranks)}, which hold replicas of "
                    f"it: its mean size is {smallest:.2g} on one and {largest:.2g} on another."
                )
                return [make_finding("drift", step_on_ranks[0].code_line, replicas.ranks, sentence)]
    return []


def largest_gradient_mean(step_on_ranks: Sequence[Step]) -> float:
    """The largest mean absolute value of a parameter's gradient in a step, on any rank; 0 if none is recorded."""
    means = [0.0]
    for step in step_on_ranks:
        means += step.gradient_means.values()
    return max(means)


def find_unwrapped(records: Sequence[Record]) -> list[Finding]:
    """Find ranks whose weights drift apart, because nothing averages the gradients of the model that they all train.

    There are two such mistakes:
    - mesh_of_one: fully_shard was given a mesh of one rank, so each rank has a model of its own.
    - drift: the model is not wrapped at all.

    A script that averages weights only every 500 steps has to be observed for more than 500, or has to allow "drift".
    ``records`` has one Record of each rank.
    """
    if sends_by_hand(records):  # the script may average gradients or weights itself
        return []
    if has_different_gpus(records):  # their rounding may differ
        return []
    drifted = first_step_of_drift(records)
    if drifted is None:
        return []

    ranks = [record.rank for record in records]
    if train_same_unwrapped_model(records, kind="mesh of one"):
        sentence = f"fully_shard divides the model over one rank, so {listed(ranks)} train models of their own."
        return [make_finding("mesh_of_one", drifted.code_line, ranks, sentence)]

    is_one_training = train_same_unwrapped_model(records, kind="plain") and divides_one_training(records)
    begin_equal = equal(initial_weights(record) for record in records)
    if is_one_training and begin_equal:
        sentence = (
            f"The model is equal on {listed(ranks)} before the first step and differs after step {drifted.number}: "
            "nothing averages its gradients."
        )
        return [make_finding("drift", drifted.code_line, ranks, sentence)]
    return []


def first_step_of_drift(records: Sequence[Record]) -> Step | None:
    """The first step after which the ranks' weights differ and do not become equal again, or None.

    They do become equal again where the script averages them every few steps.
    """
    first_step = None
    for steps in common_steps(records):
        if not steps[0].weights_after:  # no checksums were recorded after this step
            continue
        if equal(step.weights_after for step in steps):
            first_step = None
        elif first_step is None:
            first_step = steps[0]
    return first_step


def divides_one_training(records: Sequence[Record]) -> bool:
    """Whether the script shows that the ranks train one model: it divides a dataset among them, or only rank 0 saves.

    Otherwise each rank may train a model of its own on purpose, as in a search for the best settings.
    """
    saving_ranks = [record.rank for record in records if record.saves]
    only_rank_0_saves = saving_ranks == [0]
    return only_rank_0_saves or all(trains_on_divided_data(record) for record in records)


def trains_on_divided_data(record: Record) -> bool:
    """Whether a rank has trained on its part of a dataset that a DistributedSampler divides."""
    return any(epoch.divided and epoch.steps > 0 for epoch in record.epochs)


def find_different_start(records: Sequence[Record]) -> list[Finding]:
    """Find gradients that were averaged by hand, and are applied to weights that differ from the start.

    It is certain if in each optimizer's first step all ranks have equal gradients, which change their weights.
    ``records`` has one Record of each rank.
    """
    if not train_same_unwrapped_model(records, kind="plain"):
        return []
    starts = [initial_weights(record) for record in records]
    different = [key for key in starts[0] if not equal(start[key] for start in starts)]
    if not different:
        return []
    for steps in common_steps(records):
        is_first_of_optimizer = len(steps[0].weights_before) > 0  # only before these steps are the weights recorded
        if is_first_of_optimizer and not applies_equal_gradients(steps):
            return []
    ranks = [record.rank for record in records]
    sentence = f"{listed(ranks).capitalize()} apply equal gradients to different weights: {names_of(different)}."
    return [make_finding("different_start", records[0].steps[0].code_line, ranks, sentence)]


def applies_equal_gradients(steps: Sequence[Step]) -> bool:
    """Whether an optimizer's first step has equal gradients on all ranks, and each of them changes its weight.

    ``steps`` is what each rank has recorded of the step: [rank 0's Step, rank 1's Step, …].
    """
    keys = list(steps[0].gradients)
    if not keys or not equal(step.gradients for step in steps):
        return False
    for step in steps:
        # Equal gradients that change no weight, such as zeros, were not averaged by anybody.
        if any(step.weights_after.get(key) == step.weights_before.get(key) for key in keys):
            return False
    return True


# --- comparing the ranks: are samples, orders and random numbers different where they should be? ----------------------
# The ranks that train one model are compared two at a time, and an order with the one of the rank's last epoch.


def data_parallel_ranks(model: str, records: Sequence[Record]) -> set[int]:
    """The ranks that average the gradients of a model, so that their data should differ; empty if that is not certain.

    ``model`` is the model's name in the records, such as "DDP Net 1".
    """
    descriptions = [record.models[model] for record in records if model in record.models]
    if any(description.communicates for description in descriptions):
        return set()  # a model that communicates in its own forward may rightly get the same data on several ranks
    if descriptions[0].wrapper:
        return set(descriptions[0].data_ranks)

    # An unwrapped model counts if it starts equal on all ranks, and its gradients are averaged by hand or by nobody.
    if not train_same_unwrapped_model(records, kind="plain"):
        return set()
    if not equal(initial_weights(record) for record in records):
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


def data_parallel_models(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Yields each model that several ranks should train on different data: (its name, the records of these ranks)."""
    for model in models_of(records):
        ranks = data_parallel_ranks(model, records)
        model_records = []
        for record in records:
            has_trained = model in record.models and len(record.steps) > 0
            if record.rank in ranks and has_trained:
                model_records.append(record)
        if len(model_records) > 1:
            yield model, model_records


def forwards_of(record: Record, model: str) -> list[Forward]:
    """A rank's calls of a model in training, in order."""
    return [forward for forward in record.forwards if forward.model == model]


def epochs_of(record: Record, model: str) -> list[Epoch]:
    """The epochs whose batches a model was trained on."""
    return [epoch for epoch in record.epochs if model in epoch.models]


@dataclass(frozen=True)
class PairOfRanks:
    """Two ranks that train a model, and their calls of it in training: as many of each as both have made."""

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

    def has_equal_inputs(self) -> bool:
        """Whether both ranks got the same batch in each of their calls."""
        return all(first_call.inputs == second_call.inputs for first_call, second_call in self.calls())

    def has_different_inputs(self) -> bool:
        """Whether the ranks got different batches in each of their calls."""
        return all(first_call.inputs != second_call.inputs for first_call, second_call in self.calls())

    def has_equal_dropout(self) -> bool:
        """Whether dropout began with the same random state on both ranks, in each of their calls."""
        return all(first_call.dropout_state == second_call.dropout_state for first_call, second_call in self.calls())


def pairs_of_ranks(model: str, model_records: Sequence[Record]) -> Iterator[PairOfRanks]:
    """Yields each pair of the ranks that train a model. ``model_records`` are the records of these ranks."""
    for first, second in itertools.combinations(model_records, 2):
        first_calls = forwards_of(first, model)
        second_calls = forwards_of(second, model)
        count = min(len(first_calls), len(second_calls))  # how many calls both ranks have made
        yield PairOfRanks(
            first=first,
            second=second,
            first_calls=first_calls[:count],
            second_calls=second_calls[:count],
        )


def pairs_of_epochs(model: str, first: Record, second: Record) -> Iterator[tuple[Epoch, Epoch]]:
    """Yields the first epoch in which each of two ranks trains a model, then the second of each, and so on.

    It ends with the last epoch that both have begun.
    """
    return zip(epochs_of(first, model), epochs_of(second, model), strict=False)


def find_same_samples(records: Sequence[Record]) -> list[Finding]:
    """Find ranks that train on the same samples. ``records`` has one Record of each rank.

    Either their models get equal inputs in each call, or their loaders give out equal indices of equal datasets.
    """
    findings = []
    for model, model_records in data_parallel_models(records):
        for pair in pairs_of_ranks(model, model_records):
            finding = find_same_inputs(pair)
            if finding is None:
                finding = find_same_indices(model, pair)
            if finding is not None:
                findings.append(finding)
    return merged(findings)


def find_same_inputs(pair: PairOfRanks) -> Finding | None:
    """A finding if the model gets the same inputs on both ranks in each call, or None."""
    different_batches = {call.inputs for call in pair.first_calls}  # checksums of the batches of the first rank
    trains_on_one_batch = len(different_batches) <= 1  # again and again, as a benchmark does
    may_be_chance = sum(call.elements for call in pair.first_calls) < FEWEST_ELEMENTS
    if trains_on_one_batch or may_be_chance or not pair.has_equal_inputs():
        return None
    sentence = f"{listed(pair.ranks).capitalize()} train on the same {len(different_batches)} batches."
    code_line = source_of(pair.first, pair.first_calls[0])
    return make_finding("same_samples", code_line, pair.ranks, sentence)


def source_of(record: Record, forward: Forward) -> CodeLine:
    """The line of the first loop over a loader that a rank trains on, or that of the model's call if there is none."""
    for epoch in record.epochs:
        if epoch.steps:
            return epoch.code_line
    return forward.code_line


def find_same_indices(model: str, pair: PairOfRanks) -> Finding | None:
    """A finding if a loader gives both ranks, which train one model, the same samples, or None.

    The batches may look different, because each rank augments its own samples. So the indices are compared that the
    sampler has given to the loader.
    """
    rows_of_calls = [call.rows for call in pair.first_calls]
    most_rows_of_calls = max(rows_of_calls, default=0)
    for epoch, other_epoch in pairs_of_epochs(model, pair.first, pair.second):
        has_same_dataset = epoch.dataset is not None and epoch.dataset == other_epoch.dataset
        is_same_loader = epoch.loader == other_epoch.loader  # the first that each rank made, or the second, …
        if not has_same_dataset or not is_same_loader:
            continue
        # Each rank may load the batch of all ranks, and train on its own rows of it.
        takes_a_part = most_rows_of_calls < epoch.rows
        if takes_a_part:
            continue
        both_trained_on_it = epoch.steps >= FEWEST_BATCHES and other_epoch.steps >= FEWEST_BATCHES
        may_be_chance = epoch.samples < FEWEST_SAMPLES
        if not both_trained_on_it or may_be_chance:
            continue
        if equal_beginnings(epoch.indices, other_epoch.indices):
            sentence = f"The {epoch.sampler} gives {listed(pair.ranks)} the same indices of the same dataset."
            return make_finding("same_samples", epoch.code_line, pair.ranks, sentence)
    return None


def equal_beginnings(first: list[int], second: list[int]) -> bool:
    """Whether two epochs begin with the same batches: at least FEWEST_BATCHES, and as many as both lists have.

    The lists have checksums of the batches' indices.
    """
    length = min(len(first), len(second))
    return length >= FEWEST_BATCHES and first[:length] == second[:length]


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings of the same kind at the same line, each about two ranks, into one finding about all these ranks.

    For example "Ranks 0 and 1 …" and "Ranks 0 and 2 …" become "Ranks 0, 1 and 2 …".
    """
    by_line: dict[tuple[str, str, int], Finding] = {}  # {(kind, file, line): the findings there so far, as one}
    for finding in findings:
        key = (finding.kind, finding.file, finding.line)
        earlier = by_line.get(key)
        if earlier is None:
            by_line[key] = finding
        else:
            by_line[key] = with_ranks(earlier, {*earlier.ranks, *finding.ranks})
    return list(by_line.values())


def with_ranks(finding: Finding, ranks: Iterable[int]) -> Finding:
    """The same finding about other ranks. Its sentence names its ranks, perhaps at the beginning, and is changed, too.

    For example "Ranks 0 and 1 train on the same 2 batches." becomes "Ranks 0, 1 and 2 train on the same 2 batches."
    """
    old_words = listed(finding.ranks)
    new_words = listed(ranks)
    sentence = finding.sentence.replace(old_words, new_words)
    sentence = sentence.replace(old_words.capitalize(), new_words.capitalize())
    return replace(finding, ranks=tuple(sorted(ranks)), sentence=sentence)


def find_same_noise(records: Sequence[Record]) -> list[Finding]:
    """Find ranks whose dropout begins with the same random state in each call, while their batches differ.

    They drop the same units, so they learn less than from different noise. ``records`` has one Record of each rank.
    """
    findings = []
    for model, model_records in data_parallel_models(records):
        for pair in pairs_of_ranks(model, model_records):
            calls = len(pair.first_calls)
            may_be_chance = calls < FEWEST_DRAWS
            has_dropout = all(call.dropout_state is not None for call in pair.first_calls)
            if may_be_chance or not has_dropout:
                continue
            if pair.has_equal_dropout() and pair.has_different_inputs():
                sentence = f"{listed(pair.ranks).capitalize()} drop the same units in each of {calls} forward passes."
                code_line = pair.first_calls[0].code_line
                findings.append(make_finding("same_noise", code_line, pair.ranks, sentence))
    return merged(findings)


def find_same_augmentation(records: Sequence[Record]) -> list[Finding]:
    """Find datasets that give two ranks different samples, but draw the same random numbers to augment them.

    ``records`` has one Record of each rank.
    """
    findings = []
    for model, model_records in data_parallel_models(records):
        for first, second in itertools.combinations(model_records, 2):
            for epoch, other_epoch in pairs_of_epochs(model, first, second):
                if draw_the_same(epoch, other_epoch):
                    ranks = (first.rank, second.rank)
                    sentence = f"{listed(ranks).capitalize()} draw the same random numbers for different samples."
                    findings.append(make_finding("same_noise", epoch.code_line, ranks, sentence))
    return merged(findings)


def draw_the_same(first: Epoch, second: Epoch) -> bool:
    """Whether two ranks drew the same random numbers, for different samples, in each of at least FEWEST_DRAWS batches.

    The first batch is not compared, because a sampler may draw its order before it. Each epoch has recorded two numbers
    for each of its first batches: a checksum of the random states from which the batch drew (0 if it drew nothing), and
    a checksum of the batch's indices.
    """
    both_were_trained_on = first.steps >= FEWEST_DRAWS and second.steps >= FEWEST_DRAWS
    if not both_were_trained_on:
        return False
    recorded_batches = min(len(first.random_draws), len(second.random_draws), len(first.indices), len(second.indices))
    compared_batches = range(1, recorded_batches)
    if len(compared_batches) < FEWEST_DRAWS:
        return False
    for batch in compared_batches:
        draws_nothing = first.random_draws[batch] == 0
        same_draws = first.random_draws[batch] == second.random_draws[batch]
        same_samples = first.indices[batch] == second.indices[batch]
        if draws_nothing or not same_draws or same_samples:
            return False
    return True


def find_different_noise(records: Sequence[Record]) -> list[Finding]:
    """Find a dropout whose input is equal on two tensor-parallel ranks, and whose output is not.

    Such ranks hold the same activation, and each has to drop the same units of it. ``records`` has one Record of each
    rank.
    """
    for first, second in itertools.combinations(records, 2):
        dropped_differently = []
        for dropout, other in zip(first.dropouts, second.dropouts, strict=False):  # as many as both ranks have
            are_in_one_group = second.rank in dropout.ranks
            same_input = dropout.input == other.input
            same_output = dropout.output == other.output
            if are_in_one_group and same_input and not same_output:
                dropped_differently.append(dropout)
        if len(dropped_differently) >= 2:
            ranks = (first.rank, second.rank)
            sentence = f"A dropout gets the same activation on {listed(ranks)} and drops different units of it."
            return [make_finding("different_noise", dropped_differently[0].code_line, ranks, sentence)]
    return []


def find_repeated_orders(records: Sequence[Record]) -> list[Finding]:
    """Find two epochs of one loader that have the same order of samples, although the sampler shuffles.

    A DistributedSampler gives a new order only after ``set_epoch`` with another number. ``records`` has one Record of
    each rank, and each is looked at alone.
    """
    findings = []
    for record in records:
        epochs_by_loader = sorted(record.epochs, key=lambda epoch: epoch.loader)  # each loader's stay in their order
        for earlier, later in itertools.pairwise(epochs_by_loader):
            if repeats_order(earlier, later):
                sentence = (
                    f"The {later.sampler} gives the same order in two epochs: its epoch stays {later.sampler_epoch}."
                )
                findings.append(make_finding("same_order", later.code_line, [record.rank], sentence))
    return merged(findings)


def repeats_order(earlier: Epoch, later: Epoch) -> bool:
    """Whether two epochs of a rank, one after the other, certainly have the same order because of a missing set_epoch.

    ``sampler_epoch`` is what set_epoch was given last, or -1 if the sampler has no such method.
    """
    if earlier.loader != later.loader or not earlier.shuffled:
        return False
    both_were_trained_on = earlier.steps >= FEWEST_BATCHES and later.steps >= FEWEST_BATCHES
    if not both_were_trained_on:
        return False
    if later.sampler_epoch < 0 or earlier.sampler_epoch != later.sampler_epoch:
        return False
    if later.samples < FEWEST_SAMPLES:  # the order of so few may be the same by chance
        return False
    return equal_beginnings(earlier.indices, later.indices)


# --- comparing the ranks: are wrapped models called, and steps made, equally often? -----------------------------------
# A call that communicates, or a step, that some ranks leave out is paired with a later one of theirs.


def wrapped_models(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Yields each wrapped model: (its name, the records of the ranks that average its gradients).

    A model inside torch's Join is left out, because there some ranks may call it less often than others.
    """
    for model in models_of(records):
        records_with_model = [record for record in records if model in record.models and record.steps]
        if not records_with_model:
            continue
        is_in_join = any(record.models[model].is_in_join for record in records_with_model)
        description = records_with_model[0].models[model]
        if description.wrapper and not is_in_join:
            yield model, [record for record in records_with_model if record.rank in description.data_ranks]


def find_calls_on_some_ranks(records: Sequence[Record]) -> list[Finding]:
    """Find a wrapped model that some ranks call more often than others before a step, as to validate on rank 0 alone.

    These calls communicate, so they pair up with different calls of the other ranks. One finding is enough: the counts
    go on, so after the first difference all later steps differ, too. ``records`` has one Record of each rank.
    """
    for model, model_records in wrapped_models(records):
        for steps in common_steps(model_records):
            calls_of_ranks = {}  # {rank: how it has called the model until this step}
            for record, step in zip(model_records, steps, strict=True):
                if model in step.calls:
                    calls_of_ranks[record.rank] = step.calls[model]
            finding = compare_calls(calls_of_ranks, steps[0])
            if finding is not None:
                return [finding]
    return []


def compare_calls(calls_of_ranks: dict[int, Calls], step: Step) -> Finding | None:
    """A finding if some ranks have called a wrapped model more often than others before a step, or None.

    ``calls_of_ranks`` is {rank: how it has called the model until then}. ``step`` is any rank's record of the step.
    """
    if len(calls_of_ranks) < 2:
        return None
    # If the ranks have not averaged gradients equally often, a step was left out, which is another mistake.
    if not equal(calls.averaged for calls in calls_of_ranks.values()):
        return None

    with_gradients = {rank: calls.to_average for rank, calls in calls_of_ranks.items()}
    if not equal(with_gradients.values()):
        return uneven_calls(with_gradients, "with gradients", calls_of_ranks, step)

    # A finding about calls without gradients is only a note. DDP broadcasts its buffers in them, and leaves that out in
    # the next call. So the ranks' broadcasts pair up, and programs that evaluate on rank 0 alone work. They would not
    # between the first two steps, where DDP also broadcasts how it divides the gradients into buckets.
    without_gradients = {rank: calls.to_broadcast for rank, calls in calls_of_ranks.items()}
    if not equal(without_gradients.values()):
        finding = uneven_calls(without_gradients, "without gradients", calls_of_ranks, step)
        return replace(finding, is_note=True)
    return None


def uneven_calls(counts: dict[int, int], manner: str, calls_of_ranks: dict[int, Calls], step: Step) -> Finding:
    """The finding that some ranks have called a wrapped model more often than others before ``step``.

    ``counts`` is {rank: how often}, and ``manner`` says which calls are counted: "with gradients". ``calls_of_ranks``
    has the lines of the calls. The finding is at a line that only a rank with the most calls has, if there is one.
    """
    most = max(counts.values())
    fewest = min(counts.values())
    ranks_with_most = [rank for rank, count in counts.items() if count == most]
    ranks_with_fewest = [rank for rank, count in counts.items() if count == fewest]
    ranks_with_more = [rank for rank, count in counts.items() if count > fewest]
    sentence = (
        f"Before step {step.number}, the wrapped model is called {manner} {most} times on "
        f"{listed(ranks_with_more)} and {fewest} times elsewhere."
    )
    lines_of_most = calls_of_ranks[ranks_with_most[0]].code_lines
    lines_of_fewest = calls_of_ranks[ranks_with_fewest[0]].code_lines
    lines_only_of_most = [line for line in lines_of_most if line not in lines_of_fewest]
    if lines_only_of_most:
        code_line = lines_only_of_most[0]
    else:
        code_line = step.code_line
    return make_finding("rank_alone", code_line, ranks_with_more, sentence)


@dataclass(frozen=True)
class LeftOutStep:
    """A step of an optimizer that a rank did not make. ``step`` is another rank's record of it."""

    rank: int
    step: Step


def left_out_steps(model: str, model_records: Sequence[Record]) -> list[LeftOutStep]:
    """The optimizer steps that some ranks made after they had averaged a model's gradients, and others did not make.

    ``model_records`` are the records of the ranks that train the model.
    """
    left_out = []
    for optimizer in optimizers_of(model, model_records):
        steps_of_ranks = {record.rank: steps_by_backward(record, optimizer, model) for record in model_records}
        a_rank_has_no_step = any(len(own_steps) == 0 for own_steps in steps_of_ranks.values())
        if a_rank_has_no_step:
            continue
        # A slower rank may yet make the steps after the last backward pass that every rank has come to.
        last_of_all = min(max(own_steps) for own_steps in steps_of_ranks.values())
        steps_of_any_rank: dict[
            int, Step
        ] = {}  # {number of the backward pass: the step of the first rank that made it}
        for own_steps in steps_of_ranks.values():
            for backward, step in own_steps.items():
                steps_of_any_rank.setdefault(backward, step)
        for rank, own_steps in steps_of_ranks.items():
            for backward, step in steps_of_any_rank.items():
                if backward <= last_of_all and backward not in own_steps:
                    left_out.append(LeftOutStep(rank, step))
    return left_out


def steps_by_backward(record: Record, optimizer: int, model: str) -> dict[int, Step]:
    """A rank's steps of an optimizer: {number of the last backward pass of the model before the step: the step}.

    Only backward passes that average gradients are counted. All ranks take part in these, so a pass has the same number
    on all ranks, and the number says which of their steps belong together.
    """
    steps = {}
    for step in record.steps:
        if step.optimizer == optimizer and model in step.calls:
            steps[step.calls[model].averaged] = step
    return steps


def optimizers_of(model: str, model_records: Sequence[Record]) -> list[int]:
    """The numbers of the optimizers that have parameters of a model, in order."""
    numbers = set()
    for record in model_records:
        for step in record.steps:
            if model in step.calls:
                numbers.add(step.optimizer)
    return sorted(numbers)


def find_uneven_steps(records: Sequence[Record]) -> list[Finding]:
    """Find steps of an optimizer that some ranks leave out, for example because they skip a step after a large loss.

    ``records`` has one Record of each rank.
    """
    for model, model_records in wrapped_models(records):
        left_out = left_out_steps(model, model_records)
        if left_out:
            step = left_out[0].step
            ranks = {missing.rank for missing in left_out}
            sentence = (
                f"{listed(ranks).capitalize()} did not make the optimizer step that is step {step.number} elsewhere."
            )
            return [make_finding("uneven_steps", step.code_line, ranks, sentence)]
    return []


# --- comparing the ranks: are evaluations, logs and files those of all ranks? -----------------------------------------
# What ranks do with their results, apart from the training itself.


def find_different_buffers(records: Sequence[Record]) -> list[Finding]:
    """Find ranks that evaluate with different batch statistics of BatchNorm, and then add up their results.

    The sum then depends on which rank evaluates which data. ``records`` has one Record of each rank.
    """
    for parts in evaluations_to_compare(records):
        first = parts[0].evaluation
        for buffer in first.buffers:
            checksums_of_ranks = [part.evaluation.buffers.get(buffer) for part in parts]
            if not equal(checksums_of_ranks):
                ranks = [part.rank for part in parts]
                sentence = f"{buffer} differs on {listed(ranks)}, whose results are then added up."
                return [make_finding("different_buffers", first.code_line, ranks, sentence)]
    return []


@dataclass(frozen=True)
class EvaluationOfRank:
    """A rank's part in an evaluation."""

    rank: int
    evaluation: Evaluation


def evaluations_to_compare(records: Sequence[Record]) -> list[list[EvaluationOfRank]]:
    """The evaluations in which several ranks evaluate one model on different data: a list of the ranks' parts for each.

    Only evaluations whose results are added up are compared, and only if all ranks have equal weights.
    """
    parts_of: dict[tuple[str, int], list[EvaluationOfRank]] = {}  # {(model, number of the evaluation): its parts}
    for record in records:
        for evaluation in record.evaluations:
            if evaluation.reduced:
                parts = parts_of.setdefault((evaluation.model, evaluation.number), [])
                parts.append(EvaluationOfRank(record.rank, evaluation))
    comparable = []
    for parts in parts_of.values():
        same_weights = equal(part.evaluation.weights for part in parts)
        same_data = equal(part.evaluation.inputs for part in parts)
        if same_weights and not same_data:
            comparable.append(parts)
    return comparable


def find_own_losses(records: Sequence[Record]) -> list[Finding]:
    """Find a loss that rank 0 reads, as to log it, although it is only the loss of that rank's share of the data.

    It is certain if rank 0 alone reads a loss, no rank ever sends something as small as a loss, and the ranks' batches
    differ. ``records`` has one Record of each rank.
    """
    records_that_read = [record for record in records if record.loss_reads]
    only_rank_0_reads = [record.rank for record in records_that_read] == [0]
    if not only_rank_0_reads:
        return []
    loss_may_be_reduced = any(record.sizes_of_small_tensors for record in records)
    if loss_may_be_reduced:
        return []
    for model, model_records in data_parallel_models(records):
        first_batches = set()  # checksums
        for record in model_records:
            forwards = forwards_of(record, model)
            if len(forwards) >= 2:
                first_batches.add(forwards[0].inputs)
        each_has_its_own = len(first_batches) == len(model_records)
        if each_has_its_own:
            first_line_that_reads = records_that_read[0].loss_reads[0]
            sentence = "Rank 0 alone reads the loss, and no rank ever reduces one: it is the loss of rank 0's share."
            return [make_finding("own_loss", first_line_that_reads, [0], sentence)]
    return []


@dataclass(frozen=True)
class WrittenFile:
    """A file that ranks of a host write for the first time after they have made so many steps."""

    host: str
    path: str
    steps_made: int


def find_same_files(records: Sequence[Record]) -> list[Finding]:
    """Find files that several ranks of one host write at about the same time. ``records`` has one Record of each rank.

    It is about the same time if the ranks have made the same number of steps when each first writes the file.
    """
    writers: dict[WrittenFile, dict[int, CodeLine]] = {}  # {a file: {rank that writes it: the line of the rank}}
    for record in records:
        for path, save in record.saves.items():
            file = WrittenFile(record.host, path, save.steps_made)
            writers.setdefault(file, {})[record.rank] = save.code_line
    findings = []
    for file, line_of_rank in writers.items():
        ranks = list(line_of_rank)
        if len(ranks) > 1:
            sentence = f"{listed(ranks).capitalize()} all write {os.path.basename(file.path)} at the same time."
            findings.append(make_finding("same_file", line_of_rank[ranks[0]], ranks, sentence))
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
