"""``with check_training():`` finds mistakes of distributed training that raise no error. Off unless it is called.

Every rank runs it around its training, in an existing process group. While the first steps run, each rank notes
checksums of its batches, weights, gradients and buffers, and who called what. At the end the notes of all ranks are
compared. They travel through the group's store, never through a collective: a rank that makes fewer steps than
another, or that fails, keeps nobody waiting longer than ``patience`` seconds. A finding is reported only if it is
certain. The file needs PyTorch and the standard library alone, so a script can carry it, or be run by it:

    torchrun --nproc-per-node=2 training_check.py train.py --flags-of-the-script

First come the kinds of mistakes and the notes of a rank, then what observes a rank, then the rules that compare ranks,
and last ``check_training`` and the command. "The reader" is whoever reads the report: the author of the training.
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
from dataclasses import asdict, dataclass, field, replace
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

# --- the kinds of mistakes --------------------------------------------------------------------------------------------


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
    """A finding of a kind, whose cure and page are added."""
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

    synchronizing: int  # calls of forward in which this rank communicates with its peers
    averaged: int  # backward passes that averaged the gradients
    synchronized: bool = False  # whether a call since the last step was a synchronizing one
    not_synchronized: Place | None = None  # the last call before the step, if it was in no_sync
    around: Place | None = None  # a call of the wrapped module itself, past its wrapper
    places: list[Place] = field(default_factory=list)  # the lines of the synchronizing calls


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


# --- the reader's lines, and checksums --------------------------------------------------------------------------------

LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib")})
TORCH = os.path.dirname(os.path.realpath(torch.__file__))
THIS_FILE = os.path.realpath(__file__)
CHUNK = 2**23  # bytes of a tensor that are summed at once
# A tensor of at most so many elements is taken for a metric, unless a parameter has the same size.
LARGEST_METRIC = 16
OTHER_LIBRARIES = {"horovod", "deepspeed", "mpi4py", "colossalai", "bagua", "ray"}  # they communicate without torch
# Notes of the first batches, calls and failures are enough for a comparison, and must not grow with the training:
MOST_BATCHES = 32  # in each epoch
MOST_DROPOUTS = 64
MOST_EVALUATIONS = 8  # of each model
MOST_FAILURES = 20


@functools.cache
def is_readers(file: str) -> bool:
    """Whether a source file is the reader's own code, and not a library's or this check's."""
    if file.startswith("<frozen"):
        return False
    path = os.path.realpath(file)
    if path == THIS_FILE or path.startswith((TORCH, *LIBRARIES)):
        return False
    folder = os.path.dirname(THIS_FILE)
    # In the project that this file is from, its folder is a library, which launches the reader's code.
    is_launcher = os.path.basename(folder) == "helpers" and path.startswith(folder + os.sep)
    return not is_launcher


def readers_line() -> Place:
    """The innermost line of the reader's code that led here."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_readers(frame.f_code.co_filename):
            return Place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return Place("", 0)


def part_of_torch() -> str:
    """The file of torch that calls a function, such as "nn/parallel/distributed.py", or "" if the reader's code does.

    The files through which every collective goes do not count.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = os.path.realpath(frame.f_code.co_filename)
        if is_readers(frame.f_code.co_filename):
            return ""
        if file.startswith(TORCH + os.sep) and not file.endswith(("distributed_c10d.py", "c10d_logger.py")):
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


@torch.no_grad()
def checksum_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit checksum of a tensor's bytes, on its device, so that nothing waits for a GPU.

    Each word of 8 bytes is multiplied by an odd number of its own, so that words in another order give another sum.
    """
    data = local_part(tensor).detach()
    if data.layout != torch.strided or data.is_quantized or data.is_meta:
        return torch.zeros((), dtype=torch.int64)
    if data.untyped_storage().nbytes() == 0:  # it is empty, or fully_shard has freed it
        return torch.zeros((), dtype=torch.int64)
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj())
    data = data.resolve_neg().contiguous().flatten().view(torch.uint8)
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    for number, part in enumerate(data.split(CHUNK)):
        missing_bytes = -len(part) % 8
        words = nn.functional.pad(part, (0, missing_bytes)).view(torch.int64)
        words_before = number * CHUNK // 8
        first = 2 * words_before + 1
        odd_numbers = torch.arange(first, first + 2 * len(words), 2, device=data.device)
        products = words * odd_numbers
        total += (products ^ (products >> 32)).sum()  # integers of torch wrap at 2**64
    return total


def checksums(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """The checksum of each tensor, and 0 for None. The sums of one device are copied to the host together."""
    sums = {index: checksum_tensor(tensor) for index, tensor in enumerate(tensors) if tensor is not None}
    numbers = [0] * len(tensors)
    for device in {total.device for total in sums.values()}:
        sums_on_device = {index: total for index, total in sums.items() if total.device == device}
        values = torch.stack(list(sums_on_device.values())).tolist()
        for index, value in zip(sums_on_device, values, strict=True):
            numbers[index] = value
    return numbers


def combined(numbers: Iterable[int]) -> int:
    """One 64-bit checksum of several, which depends on their order."""
    total = 0
    for number in numbers:
        total = (total * 1_000_003 + number) % 2**64
    return total


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples, dictionaries and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        yield from tensors_in(list(vars(value).values()))


def random_state(device: torch.device) -> int:
    """A checksum of the state of the device's random numbers."""
    if device.type == "cuda":
        return checksums([torch.cuda.get_rng_state(device)])[0]
    return checksums([torch.get_rng_state()])[0]


def random_states(dataset: Any) -> dict[str, int]:
    """Checksums of the random states from which a dataset may draw: torch's, Python's, NumPy's and its own."""
    generators = {"torch": torch.default_generator}
    depth = 0  # of datasets inside datasets
    while dataset is not None:
        for name, value in getattr(dataset, "__dict__", {}).items():
            if isinstance(value, torch.Generator):
                generators[f"{depth} {name}"] = value
        dataset = getattr(dataset, "dataset", None)  # a Subset has the dataset that it is a part of
        depth += 1
    sums = checksums([generator.get_state() for generator in generators.values()])
    states = dict(zip(generators, sums, strict=True))
    states["random"] = crc(random.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, *rest = numpy.random.get_state()
        states["numpy"] = crc((keys.tobytes(), rest))
    return states


def crc(value: object) -> int:
    """A checksum of a value that Python prints in the same way on each rank."""
    return zlib.crc32(repr(value).encode())


def dataset_checksum(dataset: Any, depth: int = 2) -> int | None:
    """A checksum of the tensors, lists and names that a dataset holds, or None if it holds none of these.

    It looks into objects that the dataset holds, such as another dataset, down to ``depth``.
    """
    parts: list[Any] = []
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        if isinstance(value, torch.Tensor):
            parts.append((name, tuple(value.shape), beginnings([value])))
        elif isinstance(value, (str, int, float)):
            parts.append((name, value))
        elif isinstance(value, (list, tuple, range)) and len(value) > 0:
            # Its length and its two ends are enough to distinguish a list of a million file names from another.
            ends = [part for part in (value[0], value[-1]) if isinstance(part, (str, int, float, tuple))]
            tensors = [part for part in value if isinstance(part, torch.Tensor)]
            shapes = [tuple(tensor.shape) for tensor in tensors]
            parts.append((name, len(value), ends, shapes, beginnings(tensors)))
        elif depth > 0 and hasattr(value, "__getitem__") and hasattr(value, "__dict__"):
            parts.append((name, dataset_checksum(value, depth - 1)))
    if not parts:
        return None
    return crc((type(dataset).__name__, parts))


def beginnings(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Checksums of the first rows of tensors, which may be large."""
    return checksums([tensor[:256] if tensor.dim() > 0 else tensor for tensor in tensors])


# --- what observes a rank ---------------------------------------------------------------------------------------------


class Patches:
    """Functions and methods of torch that are replaced while the check runs. ``remove`` restores them.

    A hook that fails must not end the training: its traceback is noted in the record instead.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.process = os.getpid()
        self.thread = threading.get_ident()
        self.is_in_hook = False
        self.undo: list[Callable[[], None]] = []
        self.functions: dict[int, tuple[Any, Any]] = {}  # {id of the original: (the original, its replacement)}

    def is_on(self) -> bool:
        """Whether a call is noted: the script's own, in the process and the thread that train.

        A DataLoader's workers are forks of the process, and nobody would read their notes.
        """
        is_training = os.getpid() == self.process and threading.get_ident() == self.thread
        return is_training and not self.is_in_hook and bool(self.undo)

    def run(self, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a hook; return what it returns, or None if it failed. What the hook itself calls is not noted."""
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
        """Call ``hook`` with the arguments of each call of ``owner.name``, before it."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            if self.is_on():
                self.run(hook, *args, **kwargs)
            return original(*args, **kwargs)

        self.replace(owner, name, call)

    def after(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        """Call ``hook`` with the result of each call of ``owner.name``, and with its arguments."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not torch.compiler.is_compiling() and self.is_on():
                self.run(hook, result, *args, **kwargs)
            return result

        self.replace(owner, name, call)

    def replace(self, owner: Any, name: str, call: Any) -> None:
        """Put a function in the place of ``owner.name``, until ``remove``."""
        original = getattr(owner, name)
        is_inherited = isinstance(owner, type) and name not in vars(owner)
        setattr(owner, name, call)
        if is_inherited:  # without its own attribute, the class has its parent's again
            self.undo.append(lambda: delattr(owner, name))
        else:
            self.undo.append(lambda: setattr(owner, name, original))
        if not isinstance(owner, type):
            self.functions[id(original)] = (original, call)

    def replace_copies(self) -> None:
        """Replace functions in all modules, because ``from torch.x import f`` copies them."""
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                original, replacement = self.functions.get(id(value), (None, None))
                if original is not None and value is original:
                    setattr(module, name, replacement)
                    self.undo.append(functools.partial(setattr, module, name, value))

    def remove(self) -> None:
        while self.undo:
            restore = self.undo.pop()
            restore()


class LoaderObserver:
    """Notes which indices each DataLoader gives out, and whether its batches are trained on or evaluated."""

    def __init__(self, record: Record, patches: Patches) -> None:
        self.record = record
        self.loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # {loader: its number}
        self.next_numbers = itertools.count()  # a loader that is gone keeps its number
        # By the iterator of a loader:
        self.epochs: weakref.WeakKeyDictionary[Any, Epoch] = weakref.WeakKeyDictionary()
        self.prefetched: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()  # indices, as in Epoch
        self.streams: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()  # checksums of batches
        self.noise = 0  # of the latest batch, as in Epoch
        self.waiting_epoch: Epoch | None = None  # the epoch of the latest batch, until a model is called
        self.training_epoch: Epoch | None = None  # the epoch of the batch that was trained on last
        self.padded_evaluation: Epoch | None = None  # an evaluation with repeated samples that has just ended
        iterator_class = dataloader_module._BaseDataLoaderIter
        patches.after(DataLoader, "__iter__", self.begin_epoch)
        patches.before(iterator_class, "_reset", self.forget_epoch)
        patches.after(iterator_class, "_next_index", self.note_indices)
        self.wrap_next(iterator_class, patches)
        self.wrap_fetch(patches)
        patches.after(dist, "all_reduce", self.find_padding)
        patches.after(dist, "reduce", self.find_padding)

    def wrap_next(self, iterator_class: Any, patches: Patches) -> None:
        """Observe the batches that the training loop gets, and the end of each epoch."""
        original = iterator_class.__next__

        def next_batch(iterator: Any) -> Any:
            try:
                batch = original(iterator)
            except StopIteration:
                if patches.is_on():
                    patches.run(self.end_epoch, iterator)
                raise
            if patches.is_on():
                patches.run(self.note_batch, iterator, batch)
            return batch

        patches.replace(iterator_class, "__next__", next_batch)

    def wrap_fetch(self, patches: Patches) -> None:
        """Observe whether loading a batch draws random numbers. A loader with workers loads in them, unobserved."""
        original = _MapDatasetFetcher.fetch

        def fetch(fetcher: Any, indices: Any) -> Any:
            before: dict[str, int] = {}
            if patches.is_on():
                before = patches.run(random_states, fetcher.dataset) or {}
            batch = original(fetcher, indices)
            if patches.is_on():
                patches.run(self.note_noise, before, fetcher.dataset)
            return batch

        patches.replace(_MapDatasetFetcher, "fetch", fetch)

    def begin_epoch(self, iterator: Any, loader: Any) -> None:
        """Note what the loader and its sampler say of the epoch that begins."""
        if loader not in self.loaders:
            self.loaders[loader] = next(self.next_numbers)
        sampler = loader.sampler
        if loader.batch_sampler is not None:
            sampler = getattr(loader.batch_sampler, "sampler", None)
        is_stream = isinstance(loader.dataset, IterableDataset)
        samples = 0
        if not is_stream and hasattr(loader.dataset, "__len__"):
            samples = len(loader.dataset)
        padded_length = 0
        if isinstance(sampler, DistributedSampler) and not sampler.drop_last and sampler.total_size != samples:
            padded_length = sampler.total_size
        epoch = Epoch(
            loader=self.loaders[loader],
            place=readers_line(),
            dataset=dataset_checksum(loader.dataset),
            samples=samples,
            sampler=type(sampler).__name__,
            divided=isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1,
            shuffled=bool(getattr(sampler, "shuffle", False)),
            sampler_epoch=getattr(sampler, "epoch", -1),
            padded_length=padded_length,
            indices=self.prefetched.pop(iterator, []),  # workers begin before __iter__ returns
        )
        self.epochs[iterator] = epoch
        self.record.epochs.append(epoch)
        if is_stream and loader.num_workers > 1:
            self.streams[iterator] = []

    def forget_epoch(self, iterator: Any, *args: Any, **kwargs: Any) -> None:
        """A loader with persistent workers uses its iterator again in the next epoch."""
        self.epochs.pop(iterator, None)

    def note_indices(self, indices: Any, iterator: Any) -> None:
        """Note the indices of one batch, which the sampler has just given."""
        if indices is None:
            return
        epoch = self.epochs.get(iterator)
        if epoch is None:
            noted = self.prefetched.setdefault(iterator, [])
        else:
            noted = epoch.indices
        if len(noted) < MOST_BATCHES:
            noted.append(crc(indices))

    def note_noise(self, before: dict[str, int], dataset: Any) -> None:
        """Note from which random states a batch was made: those that are other ones than ``before``."""
        after = random_states(dataset)
        self.noise = combined(before[name] for name in before if after.get(name) != before[name])

    def note_batch(self, iterator: Any, batch: Any) -> None:
        epoch = self.epochs.get(iterator)
        self.waiting_epoch = epoch
        if epoch is not None:
            if len(epoch.noise) < MOST_BATCHES:
                epoch.noise.append(self.noise)
            if iterator in self.streams:
                self.check_stream(iterator, batch, epoch)
        self.noise = 0

    def check_stream(self, iterator: Any, batch: Any, epoch: Epoch) -> None:
        """Find workers of which each yields the whole stream.

        A loader takes one batch from each worker in turn. So the batches of a round are equal then, and because a
        stream of equal batches is no mistake, those of three rounds have to differ from each other.
        """
        workers = iterator._num_workers
        batches = self.streams[iterator]
        batches.append(combined(checksums(list(tensors_in(batch)))))
        if len(batches) < 3 * workers:
            return
        del self.streams[iterator]
        rounds = [set(batches[first : first + workers]) for first in range(0, 3 * workers, workers)]
        equal_in_rounds = all(len(batches_of_round) == 1 for batches_of_round in rounds)
        if equal_in_rounds and len(set(batches)) == 3:
            sentence = f"All {workers} workers of this loader yield the same batches, one after the other."
            self.record.add_finding("stream_repeated", epoch.place, sentence)

    def end_epoch(self, iterator: Any) -> None:
        """Note an evaluation that got repeated samples. In fewer than 8 samples a number may be equal by chance."""
        epoch = self.epochs.get(iterator)
        if epoch is None:
            return
        if epoch.padded_length >= 8 and epoch.evaluated > 0 and epoch.steps == 0:
            self.padded_evaluation = epoch

    def model_called(self, model: str, with_gradients: bool) -> None:
        """Note whether the latest batch is trained on or evaluated, which a model's first call after it shows."""
        epoch = self.waiting_epoch
        if epoch is None:
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
        if self.training_epoch is not None:
            self.training_epoch.steps += 1

    def find_padding(self, result: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        """Find the number of samples with the repeated ones in a tensor that is reduced after an evaluation."""
        epoch = self.padded_evaluation
        if epoch is None or not isinstance(tensor, torch.Tensor) or tensor.numel() > LARGEST_METRIC:
            return
        if result is not None:  # the Work of an asynchronous collective, which has not yet filled the tensor
            return
        values = local_part(tensor).flatten().tolist()
        if epoch.padded_length in values:
            added = epoch.padded_length - epoch.samples
            sentence = (
                f"The evaluation counts {epoch.padded_length} samples of {epoch.samples}: the DistributedSampler "
                f"of the loop in line {epoch.place.line} gives {added} of them twice."
            )
            self.record.add_finding("counted_twice", readers_line(), sentence)
            self.padded_evaluation = None


@dataclass(frozen=True)
class Clip:
    """A call that clips the gradients of parameters, which are given by their ids."""

    parameters: set[int]
    place: Place


@dataclass(frozen=True)
class ObservedScheduler:
    """A learning-rate scheduler, and in which order it and its optimizer step."""

    scheduler: Any
    first_step: Place
    order: list[str]  # "scheduler" and "optimizer"; begins with "later" if what came before is not known


class ScalerObserver:
    """Notes in which order a GradScaler, clipping, optimizers and schedulers are called."""

    def __init__(self, record: Record, patches: Patches) -> None:
        self.record = record
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
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self.wrap_clip(name, patches)
        self.wrap_step(patches)
        for scheduler in vars(lr_scheduler).values():
            if isinstance(scheduler, type) and "step" in vars(scheduler):
                self.wrap_scheduler(scheduler, patches)

    def scale(self, scaler: Any, outputs: Any) -> None:
        if scaler.is_enabled():
            self.scalers[id(scaler)] = scaler

    def read_scale(self, scaler: Any) -> None:
        """Note that the script's own code asks for the scale, so it may divide gradients by it."""
        if part_of_torch() == "":
            self.unscaled_by_hand.add(id(scaler))

    def is_scaling(self, scaler: Any) -> bool:
        """Whether a scaler certainly multiplied the gradients, and nobody but its ``unscale_`` divides them again."""
        if id(scaler) not in self.scalers or id(scaler) in self.unscaled_by_hand or scaler._scale is None:
            return False
        return value_of(scaler._scale) != 1.0

    def is_unscaled(self, scaler: Any, optimizer: Any) -> bool:
        """Whether ``scaler.unscale_(optimizer)`` was called since the last step."""
        state = scaler._per_optimizer_states.get(id(optimizer))
        return state is not None and state["stage"].name != "READY"

    def wrap_clip(self, name: str, patches: Patches) -> None:
        original = getattr(nn.utils, name)

        @functools.wraps(original)
        def clip(parameters: Any, limit: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(parameters, torch.Tensor):
                parameters = list(parameters)  # a generator yields them once, and they are needed twice
            norm = original(parameters, limit, *args, **kwargs)
            if patches.is_on():
                patches.run(self.note_clip, parameters, limit, norm)
            return norm

        patches.replace(nn.utils, name, clip)

    def note_clip(self, parameters: Any, limit: Any, norm: Any) -> None:
        """Note which gradients were clipped, unless their norm was only measured, or was below the limit."""
        if float(limit) == float("inf"):
            return
        # A DTensor's norm is not looked at, because its value would take a collective.
        if isinstance(norm, torch.Tensor) and not isinstance(norm, DTensor):
            if value_of(norm) <= float(limit):
                return
        clipped = {id(parameter) for parameter in tensors_in(parameters)}
        self.clips.append(Clip(clipped, readers_line()))

    def wrap_step(self, patches: Patches) -> None:
        original = GradScaler.step

        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if patches.is_on():
                patches.run(self.scaler_steps, scaler, optimizer)
            self.is_in_scaler_step = True
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                self.is_in_scaler_step = False

        patches.replace(GradScaler, "step", step)

    def scaler_steps(self, scaler: Any, optimizer: Any) -> None:
        """Before ``scaler.step(optimizer)``: find gradients of this optimizer that were clipped while scaled."""
        self.stepped_scalers.add(id(scaler))
        self.note_order(optimizer)
        if self.is_scaling(scaler) and not self.is_unscaled(scaler, optimizer):
            parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for clip in self.clips:
                if not clip.parameters.isdisjoint(parameters):
                    scale = value_of(scaler._scale)
                    sentence = (
                        f"The gradients are clipped while they are still multiplied by the loss scale, {scale:g}."
                    )
                    self.record.add_finding("clipped_while_scaled", clip.place, sentence)
        self.clips = []

    def optimizer_steps(self, optimizer: Any) -> None:
        """Before an optimizer's step: if no scaler calls it, note whether its gradients are scaled."""
        if self.is_in_scaler_step:
            return
        self.clips = []
        self.note_order(optimizer)
        for scaler in self.scalers.values():
            if self.is_scaling(scaler) and not self.is_unscaled(scaler, optimizer):
                self.direct_steps[id(scaler)] = readers_line()

    def wrap_scheduler(self, scheduler_class: Any, patches: Patches) -> None:
        original = scheduler_class.step

        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if patches.is_on() and self.scheduler_depth == 0:
                patches.run(self.scheduler_steps, scheduler)
            self.scheduler_depth += 1
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self.scheduler_depth -= 1

        patches.replace(scheduler_class, "step", step)

    def scheduler_steps(self, scheduler: Any) -> None:
        steps_made = getattr(scheduler, "_step_count", 0)
        if steps_made == 0:  # it is being built, or it counts no steps
            return
        if id(scheduler) in self.schedulers:
            self.schedulers[id(scheduler)].order.append("scheduler")
            return
        optimizer = scheduler.optimizer
        has_stepped = optimizer in self.stepped_optimizers or getattr(optimizer, "_opt_called", False)
        is_first_of_all = steps_made == 1 and scheduler.last_epoch == 0 and not has_stepped
        order = ["scheduler"] if is_first_of_all else ["later"]
        self.schedulers[id(scheduler)] = ObservedScheduler(scheduler, readers_line(), order)

    def note_order(self, optimizer: Any) -> None:
        """Note an optimizer's step for each scheduler that changes its learning rates."""
        self.stepped_optimizers.add(optimizer)
        for observed in self.schedulers.values():
            if observed.scheduler.optimizer is optimizer:
                observed.order.append("optimizer")

    def close(self) -> None:
        """Add the findings that are certain only at the end."""
        for scaler, place in self.direct_steps.items():
            if scaler not in self.stepped_scalers and scaler not in self.unscaled_by_hand:
                sentence = "optimizer.step() applies gradients that are still multiplied by the loss scale."
                self.record.add_finding("wrong_order", place, sentence)
        for observed in self.schedulers.values():
            if observed.order[:6] == ["scheduler", "optimizer"] * 3:
                sentence = "The scheduler steps before the optimizer, so the first learning rate is never used."
                self.record.add_finding("wrong_order", observed.first_step, sentence)


@dataclass(frozen=True)
class Attribute:
    """An attribute of a module that holds a parameter, or has held one."""

    owner: weakref.ref  # the module
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
        self.record = record
        self.steps_made = steps_made
        # By the parameter's id, because torch.utils.swap_tensors refuses a parameter that has a weak reference.
        self.attributes: dict[int, list[Attribute]] = {}
        self.ties: list[list[Attribute]] = []
        self.is_loading = False
        self.loads: dict[int, list[Load]] = {}  # by a checksum of the keys that were given
        patches.before(nn.Module, "register_parameter", self.register)
        patches.before(nn.Module, "load_state_dict", self.load)
        patches.after(nn.Module, "load_state_dict", self.loaded)
        patches.after(dcp, "load", self.load_distributed)
        patches.before(torch, "save", self.save)

    def note_existing(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            for name, parameter in module._parameters.items():
                self.register(module, name, parameter)

    def register(self, module: nn.Module, name: str, parameter: Any) -> None:
        """Note that a module gets a parameter, and find the other attributes that hold it already."""
        if not self.is_loading:
            self.forget_ties_of(module, name)  # the script itself assigns a parameter, so it decides what is tied
        if not isinstance(parameter, nn.Parameter):
            return
        holders = self.attributes.get(id(parameter), [])
        if not any(attribute.parameter() is parameter for attribute in holders):
            holders = []  # they held an earlier parameter with this id, which is gone
        holders.append(Attribute(weakref.ref(module), name))
        self.attributes[id(parameter)] = holders
        if len(holders) == 2:  # a third attribute joins the list that is a tie already
            self.ties.append(holders)

    def forget_ties_of(self, module: nn.Module, name: str) -> None:
        for tie in self.ties:
            # In place, because ``attributes`` has the same list.
            tie[:] = [attribute for attribute in tie if attribute.owner() is not module or attribute.name != name]

    def load(self, module: nn.Module, state: Any, strict: bool = True, *args: Any, **kwargs: Any) -> None:
        self.is_loading = True
        # Not the keys of state_dict(), whose hooks may communicate.
        own = {name for name, _ in itertools.chain(module.named_parameters(), module.named_buffers())}
        if strict or not own or not state:
            return
        given = sorted(state)
        example = f"it has {min(own)}, and was given {given[0]}"
        load = Load(not own.isdisjoint(given), readers_line(), example)
        self.loads.setdefault(crc(given), []).append(load)

    def loaded(self, result: Any, *args: Any, **kwargs: Any) -> None:
        self.is_loading = False

    def load_distributed(self, result: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        """After ``dcp.load``: find what the checkpoint has and the given state has no place for."""
        planner = kwargs.get("planner")
        path = kwargs.get("checkpoint_id")
        if path is None or not os.path.isdir(path):
            return
        saved = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
        for name, part in state.items():
            is_optimizer = isinstance(part, dict) and "param_groups" in part
            if not is_optimizer or part.get("state"):
                continue
            if any(key.startswith(f"{name}.state.") for key in saved):
                sentence = (
                    f"The checkpoint holds the optimizer's moments, and {name!r} has no place for them: "
                    "the state of an optimizer that has made no step is empty."
                )
                self.record.add_finding("nothing_restored", readers_line(), sentence)
        asked = {key for key, value in flat(state) if isinstance(value, torch.Tensor)}
        if getattr(planner, "allow_partial_load", False) and asked and asked.isdisjoint(saved):
            sentence = f"Not one tensor was loaded: {min(asked)} was asked for, and the checkpoint has {min(saved)}."
            self.record.add_finding("nothing_restored", readers_line(), sentence)

    def save(self, value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(file, (str, os.PathLike)) and not os.fspath(file).startswith("/dev/"):
            path = os.path.realpath(file)
            self.record.saves.setdefault(path, Save(self.steps_made(), readers_line()))

    def broken_ties(self, model: nn.Module) -> Iterator[str]:
        """For each tie of a model whose attributes hold several parameters now: the names of these parameters."""
        paths = {module: path for path, module in model.named_modules()}
        for tie in self.ties:
            names: dict[nn.Parameter, str] = {}  # for a parameter with several names, the first one
            for attribute in tie:
                parameter = attribute.parameter()
                if parameter is None or attribute.owner() not in paths:
                    continue
                path = paths[attribute.owner()]
                names.setdefault(parameter, f"{path}.{attribute.name}".lstrip("."))
            if len(names) > 1:
                yield " and ".join(names.values())

    def close(self) -> None:
        """Find state dictionaries that matched no module. A script may try one on several modules in turn."""
        for loads in self.loads.values():
            if not any(load.has_match for load in loads):
                sentence = f"load_state_dict(strict=False) matched no key of the module: {loads[0].example}."
                self.record.add_finding("nothing_loaded", loads[0].place, sentence)


def flat(state: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dictionaries by their joined keys, as DCP names them."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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
        self.record = record
        self.sent = sent  # is called after each call that sends
        self.addresses: set[int] = set()  # where the tensors that were sent since the last step begin in memory
        for name in self.METHODS:
            if hasattr(dist.ProcessGroup, name):  # not every version has all of them
                patches.before(dist.ProcessGroup, name, self.send)
        functional = sys.modules["torch.distributed._functional_collectives"]
        for name in self.FUNCTIONAL:
            if hasattr(functional, name):
                patches.before(functional, name, self.send_functional)

    def send(self, group: Any, *args: Any, **kwargs: Any) -> None:
        if group.size() > 1:
            self.note(list(tensors_in([args, kwargs])))

    def send_functional(self, *args: Any, **kwargs: Any) -> None:
        self.note(list(tensors_in([args, kwargs])))

    def note(self, tensors: list[torch.Tensor]) -> None:
        """Note the tensors of a call, unless a part of torch calls it."""
        if part_of_torch().startswith(self.PARTS_OF_TORCH):
            return
        for tensor in tensors:
            # Functions such as all_gather_object send Python objects as bytes.
            is_small_object = tensor.dtype == torch.uint8 and tensor.numel() < 4096
            if tensor.numel() <= LARGEST_METRIC or is_small_object:
                self.record.sent_sizes.add(tensor.numel())
            else:
                self.record.sent_large = True
            if len(self.addresses) < 100_000:  # a script that never steps must not fill the memory
                self.addresses.add(local_part(tensor).data_ptr())
        self.sent()


@dataclass(eq=False)
class ObservedModel:
    """A module that the training loop calls, and how it was called so far."""

    module: nn.Module
    note: Model
    name: str = ""  # empty until the training uses the module
    calls: Calls = field(default_factory=lambda: Calls(synchronizing=0, averaged=0))
    waits_for_backward: bool = False  # since a forward whose backward will average the gradients


class TrainingObserver:
    """Observes the training of one rank for ``steps`` steps of an optimizer; ``record`` has what it saw."""

    def __init__(self, steps: int) -> None:
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
        self.hooks: list[Any] = []

    def start(self, note_existing: bool = True) -> None:
        """Begin to observe. ``note_existing``: look for the modules that the script has built already."""
        patches = self.patches
        self.loaders = LoaderObserver(self.record, patches)
        self.scalers = ScalerObserver(self.record, patches)
        self.states = StateObserver(self.record, patches, lambda: len(self.record.steps))
        self.communication = CommunicationObserver(self.record, patches, self.communicated)
        self.wrap_module_calls()
        self.wrap_backward("backward")
        self.wrap_backward("grad")
        patches.after(Optimizer, "__init__", self.optimizer_built)
        patches.after(DistributedDataParallel, "__init__", self.ddp_built)
        patches.before(torch.Tensor, "item", self.read_number)
        patches.replace_copies()
        if note_existing:
            existing = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
            patches.run(self.states.note_existing, existing)
            for module in existing:
                if isinstance(module, DistributedDataParallel):
                    patches.run(self.observed, module)
        self.hooks = [
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ]

    def remove_hooks(self) -> None:
        """Remove the hooks of optimizers. Not while one runs, because torch iterates over them."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def stop(self) -> None:
        """End the observation; ``record`` is complete then. The hooks of optimizers stay until ``remove_hooks``."""
        if self.is_finished:
            return
        self.is_finished = True
        self.patches.remove()
        for close in (self.scalers.close, self.states.close, self.find_idle_optimizers):
            self.patches.run(close)
        if dist.is_initialized():
            self.see_group()
        elif self.store is None:
            self.record.rank = int(os.environ.get("RANK", 0))  # a script that never made a group
        self.record.host = socket.gethostname()
        self.record.device = torch.backends.cpu.get_cpu_capability()
        if torch.cuda.is_available():
            self.record.device = torch.cuda.get_device_name()
        if not OTHER_LIBRARIES.isdisjoint(sys.modules):
            self.record.sent_large = True  # they may send what this check cannot see
        self.models.clear()  # they may hold much memory
        self.optimizers.clear()
        del self.loaders, self.scalers, self.states, self.communication
        rank = self.record.rank
        different_findings = dict.fromkeys(self.record.findings)
        self.record.findings = [replace(found, ranks=(rank,)) for found in different_findings]

    def see_group(self) -> None:
        """Note this rank's number in the process group, whose store the notes will go through."""
        self.record.rank = dist.get_rank()
        self.record.world_size = dist.get_world_size()
        self.store = distributed_c10d._get_default_store()

    # --- calls of modules

    def wrap_module_calls(self) -> None:
        """Observe the calls of models: modules that no other module calls, and DDP, which may be inside another."""
        original = nn.Module.__call__
        patches = self.patches

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # While a graph is compiled, or a checkpointed part is recomputed in backward, nothing new is called.
            if torch.compiler.is_compiling() or self.backward_depth > 0 or not patches.is_on():
                return original(module, *args, **kwargs)
            inner = uncompiled(module)
            is_ddp = isinstance(inner, DistributedDataParallel)
            is_model = self.call_depth == 0 or is_ddp
            self.call_depth += 1
            forward = None
            if is_model:
                forward = patches.run(self.before_model, inner, args, kwargs)
            elif self.wrapper_of:
                patches.run(self.check_wrapper, module)
            if is_ddp:
                self.running_ddp.append(inner)
            try:
                output = original(module, *args, **kwargs)
                if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
                    patches.run(self.note_dropout, args, output)
                if is_model and forward is not None:
                    patches.run(self.after_model, inner, forward)
                return output
            finally:
                self.call_depth -= 1
                if is_ddp:
                    self.running_ddp.pop()

        patches.replace(nn.Module, "__call__", call)

    def observed(self, module: nn.Module) -> ObservedModel | None:
        """The notes of a module, or None for a module without parameters, such as a loss.

        A module that was known before ``fully_shard`` wrapped it is looked at again.
        """
        known = self.models.get(id(module))
        if known is not None and (known.note.wrapper or not isinstance(module, FSDPModule)):
            return known
        if next(module.parameters(), None) is None:
            return None
        model = Model(wrapper="", data_ranks=())
        if isinstance(module, DistributedDataParallel):
            model = Model("DDP", tuple(dist.get_process_group_ranks(module.process_group)))
            for part in module.module.modules():
                self.wrapper_of[part] = weakref.ref(module)
        else:
            sharded = next((part for part in module.modules() if isinstance(part, FSDPModule)), None)
            if sharded is not None:
                model = Model("FSDP", mesh_ranks(sharded))
        self.models[id(module)] = ObservedModel(module, model)
        return self.models[id(module)]

    def use(self, model: ObservedModel) -> None:
        """Give the model a name, which is the same on all ranks that use their models in the same order."""
        if model.name:
            return
        module: Any = model.module
        if model.note.wrapper == "DDP":
            module = module.module
        kind = f"{model.note.wrapper} {type(module).__name__}".strip()
        earlier = [name for name in self.record.models if name.startswith(f"{kind} ")]
        model.name = f"{kind} {len(earlier) + 1}"
        self.record.models[model.name] = model.note

    def before_model(self, module: nn.Module, args: Any, kwargs: Any) -> Forward | None:
        """Before a call of a model, or of a loss or a metric, which have no parameters.

        Returns notes that ``after_model`` completes: of each call in training, and of the first one of an evaluation.
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
        elif self.evaluation is not None or module.training:
            return None
        inputs = list(tensors_in([args, kwargs]))
        forward = Forward(
            model=model.name,
            place=readers_line(),
            inputs=combined(checksums(inputs)),
            elements=sum(tensor.numel() for tensor in inputs),
        )
        self.has_dropped = False
        device = next(module.parameters()).device
        self.random_state = random_state(device)
        return forward

    def after_model(self, module: nn.Module, forward: Forward) -> None:
        if not torch.is_grad_enabled():
            self.note_evaluation(module, forward)
            return
        if self.has_dropped:
            forward.noise = self.random_state
        self.record.forwards.append(forward)

    def count_call(self, model: ObservedModel, with_gradients: bool) -> None:
        """Count a call of a wrapped model in which the wrapper communicates with the other ranks."""
        calls = model.calls
        if isinstance(model.module, DistributedDataParallel):
            join: Any = model.module._join_config
            if join.enable:
                model.note.joins = True
            if with_gradients and not model.module.require_backward_grad_sync:  # as in no_sync
                calls.not_synchronized = readers_line()
                return
            if not with_gradients and not model.module._check_sync_bufs_pre_fwd():
                return  # Without gradients, DDP communicates only to broadcast buffers.
        elif model.note.wrapper != "FSDP":
            return
        calls.synchronizing += 1
        place = readers_line()
        if place not in calls.places:
            calls.places.append(place)
        if with_gradients:
            calls.not_synchronized = None
            calls.synchronized = True
            model.waits_for_backward = True

    def check_wrapper(self, module: nn.Module) -> None:
        """Note a call of a module that DDP wraps, unless DDP itself calls it."""
        reference = self.wrapper_of.get(module)
        if reference is None or not torch.is_grad_enabled():
            return
        ddp = reference()
        if ddp is None or ddp in self.running_ddp:
            return
        calls = self.models[id(ddp)].calls
        if calls.around is None:
            calls.around = readers_line()

    def note_dropout(self, args: Any, output: Any) -> None:
        """Note that a dropout drew random numbers and, on tensor-parallel ranks, what it made of its input."""
        self.has_dropped = True
        ranks = self.tensor_parallel_ranks
        if not ranks or len(self.record.dropouts) >= MOST_DROPOUTS or not torch.is_grad_enabled():
            return
        given = args[0]
        if not isinstance(given, DTensor) and not isinstance(output, DTensor):
            before, after = checksums([given, output])
            self.record.dropouts.append(Dropout(readers_line(), ranks, before, after))

    @functools.cached_property
    def tensor_parallel_ranks(self) -> tuple[int, ...]:
        """The ranks among which a model's matrices are divided for tensor parallelism; empty if they are not.

        A DTensor whose last mesh dimension has other ranks than those that share the data is divided in this way.
        """
        for model in self.models.values():
            for parameter in model.module.parameters():
                if not isinstance(parameter, DTensor):
                    continue
                mesh = parameter.device_mesh
                ranks = tuple(dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1)))
                if not set(ranks) <= set(model.note.data_ranks):
                    return ranks
        return ()

    def note_evaluation(self, module: nn.Module, forward: Forward) -> None:
        """Note the first call of an evaluation. Only that of a model with batch statistics goes into the record."""
        statistics: dict[str, torch.Tensor] = {}
        for path, part in module.named_modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                for name, buffer in part.named_buffers(recurse=False):
                    statistics[f"{path}.{name}".lstrip(".")] = buffer
        earlier = [evaluation for evaluation in self.record.evaluations if evaluation.model == forward.model]
        is_recorded = bool(statistics) and len(earlier) < MOST_EVALUATIONS
        parameters = list(module.parameters())
        weights = 0
        if is_recorded and not any(isinstance(parameter, DTensor) for parameter in parameters):
            weights = combined(checksums(parameters))
        self.evaluation = Evaluation(
            model=forward.model,
            number=len(earlier),
            place=forward.place,
            inputs=forward.inputs,
            weights=weights,
            buffers=dict(zip(statistics, checksums(list(statistics.values())), strict=True)),
        )
        if is_recorded:
            self.record.evaluations.append(self.evaluation)

    # --- backward, and numbers that are read

    def wrap_backward(self, name: str) -> None:
        """Observe backward passes. In each, DDP and FSDP average the gradients of the models that were called."""
        original = getattr(torch.autograd, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.patches.is_on():
                return original(*args, **kwargs)
            self.backward_depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self.backward_depth -= 1
                for model in self.models.values():
                    if model.waits_for_backward:
                        model.waits_for_backward = False
                        model.calls.averaged += 1

        self.patches.replace(torch.autograd, name, call)

    def read_number(self, tensor: torch.Tensor) -> None:
        """Note where the script reads a loss: a number with a gradient, by ``item()`` or by float()."""
        if tensor.dim() == 0 and tensor.grad_fn is not None and part_of_torch() in ("", "_tensor.py"):
            place = readers_line()
            if place not in self.record.loss_reads:
                self.record.loss_reads.append(place)

    def communicated(self) -> None:
        """After the script's own code has sent a tensor: note whether it did so in a forward, or for an evaluation."""
        if self.call_depth > 0 and self.backward_depth == 0:
            for model in self.models.values():
                model.note.communicates = True
        if self.evaluation is not None:
            self.evaluation.reduced = True

    # --- steps of optimizers

    def ddp_built(self, result: Any, ddp: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.observed(ddp)

    def optimizer_built(self, result: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.built[optimizer] = readers_line()

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.is_finished or torch.compiler.is_compiling() or not self.patches.is_on():
            return
        is_nested = self.stepping is not None and self.stepping is not optimizer  # as in ZeroRedundancyOptimizer
        if not is_nested:
            self.patches.run(self.begin_step, optimizer)

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is self.stepping:
            self.stepping = None
            self.patches.run(self.optimizers[id(optimizer)].end, self)
            if self.record.steps[-1].number >= self.steps:
                self.stop()

    def begin_step(self, optimizer: Any) -> None:
        if dist.is_initialized() and self.store is None:
            self.see_group()
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = ObservedOptimizer(optimizer, len(self.optimizers))
        observed = self.optimizers[id(optimizer)]
        observed.name_parameters(self)
        self.stepping = optimizer
        self.scalers.optimizer_steps(optimizer)
        self.loaders.optimizer_steps()
        observed.steps += 1
        observed.begin(self)

    def find_idle_optimizers(self) -> None:
        """Find optimizers that hold parameters which the model no longer has, or that never got a gradient."""
        model_names: dict[nn.Parameter, str] = {}  # the parameters of the models that were called
        for model in self.models.values():
            if model.name:
                for name, parameter in model.module.named_parameters():
                    if parameter.requires_grad:
                        model_names[parameter] = name
        optimized = {id(parameter) for observed in self.optimizers.values() for parameter in observed.parameters()}
        not_optimized = [parameter for parameter in model_names if id(parameter) not in optimized]
        for observed in self.optimizers.values():
            idle = [parameter for parameter in observed.parameters() if id(parameter) not in observed.with_gradient]
            stale = [parameter for parameter in idle if parameter not in model_names]
            place = self.built.get(observed.optimizer, observed.place)
            optimizer_class = type(observed.optimizer)
            # A conversion of the model, or fully_shard, replaces parameters by others of the same shapes: a shard is a
            # DTensor, whose shape is that of the whole parameter.
            if stale and [parameter.shape for parameter in stale] == [parameter.shape for parameter in not_optimized]:
                sentence = (
                    f"{len(stale)} parameters of this {optimizer_class.__name__} are not the model's, so its steps "
                    f"change nothing: {model_names[not_optimized[0]]} of the model is in no optimizer."
                )
                self.record.add_finding("stale_optimizer", place, sentence)
                continue
            # Optimizers of other libraries may compute updates without gradients.
            is_of_torch = optimizer_class.__module__.startswith("torch.optim")
            if is_of_torch and observed.steps >= 3 and not observed.with_gradient and not observed.unsynchronized:
                sentence = (
                    f"{observed.steps} steps of this {optimizer_class.__name__} found no gradient at any of its "
                    "parameters."
                )
                self.record.add_finding("no_gradient", place, sentence)


class ObservedOptimizer:
    """An optimizer, and what is noted of its steps."""

    def __init__(self, optimizer: Any, index: int) -> None:
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
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def name_parameters(self, observer: TrainingObserver) -> None:
        """Give each parameter a key that is the same on all ranks.

        The key is made of the name of the model that has the parameter and of its name there. The key of a parameter
        of no known model is made of the optimizer's class, and of numbers.
        """
        if all(id(parameter) in self.keys for parameter in self.parameters()):
            return
        owners = self.find_owners(observer)
        for number, parameter in enumerate(self.parameters()):
            if id(parameter) in self.keys:
                continue
            model: ObservedModel | None = None
            owner = f"{type(self.optimizer).__name__} {self.index}"
            name = f"parameter {number}"
            if id(parameter) in owners:
                model, name = owners[id(parameter)]
                observer.use(model)
                owner = model.name
                if model not in self.models:
                    self.models.append(model)
            key = f"{owner}: {name}"
            self.keys[id(parameter)] = key
            observer.record.parameters[key] = describe(parameter, name, owner, model)

    def find_owners(self, observer: TrainingObserver) -> dict[int, tuple[ObservedModel, str]]:
        """{a parameter's id: (the model that has it, its name there)}; finds weights that are no longer tied, too.

        A model may be known both by itself and inside DDP, which comes first then.
        """
        owners: dict[int, tuple[ObservedModel, str]] = {}
        wrapped = [model for model in observer.models.values() if model.note.wrapper == "DDP"]
        called = [model for model in observer.models.values() if model.note.wrapper != "DDP" and model.name]
        for model in [*wrapped, *called]:
            module: Any = model.module
            if model.note.wrapper == "DDP":
                module = module.module
            for name, parameter in module.named_parameters():
                owners.setdefault(id(parameter), (model, name))
            for names in observer.states.broken_ties(module):
                sentence = f"{names} were one parameter when the model was built, and are two now."
                observer.record.add_finding("untied", readers_line(), sentence)
        return owners

    def note_gradients(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                self.with_gradient.add(id(parameter))

    def begin(self, observer: TrainingObserver) -> None:
        """Before a step: note how the models were called since the last one, and checksums of what it starts from."""
        self.note_gradients()
        parameters = self.parameters()
        step = Step(
            optimizer=self.index,
            number=self.steps,
            place=readers_line(),
            rates=rates_of(self.optimizer),
            settings=settings_of(self.optimizer),
            calls={model.name: replace(model.calls, places=[*model.calls.places]) for model in self.models},
        )
        for model in self.models:
            self.check_sharded_gradients(model.module, step.place, observer)
            model.calls.synchronized = False
            model.calls.not_synchronized = None
            model.calls.around = None
        if self.steps == 1:
            step.before = self.checksums_of(parameters)
        sent_addresses = observer.communication.addresses
        gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if gradients and all(gradient.data_ptr() in sent_addresses for gradient in gradients):
            observer.record.averages_gradients = True
        sent_addresses.clear()
        if self.is_sampled(observer.steps):
            step.gradients = self.checksums_of([parameter.grad for parameter in parameters])
            step.gradient_means = self.gradient_means(observer.record)
        self.step = step
        observer.record.steps.append(step)

    def end(self, observer: TrainingObserver) -> None:
        """After a step: note checksums of the weights."""
        self.note_gradients()  # a closure may have made them within the step
        if self.step is not None and self.is_sampled(observer.steps):
            self.step.after = self.checksums_of(self.parameters())

    def is_sampled(self, last: int) -> bool:
        """Whether checksums are noted at this step. Because a difference stays, steps 1, 2, 4, 8, … and the last do."""
        is_power_of_two = self.steps.bit_count() == 1
        return is_power_of_two or self.steps == last

    def checksums_of(self, tensors: Sequence[Any]) -> dict[str, int]:
        """{a parameter's key: the checksum of its tensor}, of one tensor for each parameter in order."""
        keys = [self.keys[id(parameter)] for parameter in self.parameters()]
        return dict(zip(keys, checksums(tensors), strict=True))

    def gradient_means(self, record: Record) -> dict[str, float]:
        """The mean absolute value of each DTensor's gradient, by the parameter's key.

        Each rank with a replica computes its gradient anew, so that checksums may differ by rounding, and means hardly.
        """
        means: dict[str, float] = {}
        for parameter in self.parameters():
            key = self.keys[id(parameter)]
            gradient = parameter.grad
            is_partial = isinstance(gradient, DTensor) and any(place.is_partial() for place in gradient.placements)
            if record.parameters[key].kind == "DTensor" and gradient is not None and not is_partial:
                part = local_part(gradient).detach()
                total: Any = part.float().abs().sum().tolist()
                means[key] = total / max(1, part.numel())
        return means

    def check_sharded_gradients(self, module: nn.Module, place: Place, observer: TrainingObserver) -> None:
        """Find gradients that fully_shard has not reduced. It keeps them where no optimizer sees them."""
        parts = [part for group in parameter_groups(module) for part in group.fsdp_params]
        holds_gradients = any(holds_unreduced_gradient(part) for part in parts)
        if holds_gradients and not self.unsynchronized:
            self.unsynchronized = True
            sentence = "The optimizer steps while fully_shard holds gradients that it has not reduced."
            observer.record.add_finding("not_synchronized", place, sentence)


def uncompiled(module: nn.Module) -> nn.Module:
    """The module itself, or the one that torch.compile has wrapped in it."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def holds_unreduced_gradient(fsdp_parameter: Any) -> bool:
    """Whether fully_shard keeps a gradient of the whole parameter, which it has not reduced to the ranks' shards."""
    if getattr(fsdp_parameter, "unsharded_accumulated_grad", None) is not None:
        return True
    whole = getattr(fsdp_parameter, "_unsharded_param", None)  # up to PyTorch 2.14 the gradient stays there
    return getattr(whole, "grad", None) is not None


def rates_of(optimizer: Any) -> tuple[float, ...]:
    """The learning rate of each group of parameters. It may be a tensor."""
    rates = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor):
            rate = value_of(rate)
        if rate is not None:
            rates.append(float(rate))
    return tuple(rates)


def settings_of(optimizer: Any) -> int:
    """A checksum of an optimizer's settings, such as its momentum, without the learning rate."""
    settings = []
    for group in optimizer.param_groups:
        for name, value in group.items():
            is_plain = isinstance(value, (int, float, bool, str, tuple, type(None)))
            if is_plain and name not in ("params", "lr", "initial_lr", "param_names"):
                settings.append((name, value))
    return crc(settings)


def parameter_groups(module: nn.Module) -> Iterator[Any]:
    """The groups of parameters that fully_shard made in a module."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # before PyTorch 2.12 there is one
                groups = [state._fsdp_param_group]
            yield from (group for group in groups if group is not None)


def mesh_ranks(module: nn.Module) -> tuple[int, ...]:
    """The ranks of the mesh on which fully_shard divides a module."""
    for group in parameter_groups(module):
        return tuple(group.mesh_info.mesh.mesh.flatten().tolist())
    return ()


# The communication hooks of DDP after which all ranks have the same gradients. Another hook may average otherwise.
AVERAGING_HOOKS = (
    "allreduce_hook",
    "fp16_compress_hook",
    "bf16_compress_hook",
    "powerSGD_hook",
    "batched_powerSGD_hook",
)


def describe(parameter: Any, name: str, owner: str, model: ObservedModel | None) -> Parameter:
    """The note of an optimizer's parameter: which ranks hold replicas of it. ``model``: the one that has it, if known.

    ``owner`` is the name of the model, or of an optimizer whose parameter no known model has.
    """
    kind = "plain"
    replicas: tuple[int, ...] = ()
    if model is not None and isinstance(model.module, DistributedDataParallel):
        if is_averaged(model.module, name):
            kind = "DDP"
            replicas = model.note.data_ranks
        else:
            kind = "not averaged by DDP"
    elif isinstance(parameter, DTensor):
        kind = "DTensor"
        mesh = parameter.device_mesh
        root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
        if root.size() == 1 and dist.get_world_size() > 1:
            kind = "mesh of one"
        replicas = replicas_of(parameter)
    return Parameter(owner, name, kind, local_part(parameter).numel(), replicas)


def is_averaged(ddp: DistributedDataParallel, name: str) -> bool:
    """Whether DDP gives all ranks the same gradient of a parameter."""
    hooks = [getattr(hook, "__name__", "") for hook, _ in getattr(ddp, "_comm_hooks", [])]
    return name not in ddp.parameters_to_ignore and all(hook in AVERAGING_HOOKS for hook in hooks)


def replicas_of(parameter: DTensor) -> tuple[int, ...]:
    """The ranks that hold the same part of a DTensor as this one, or none if it is the only one.

    They are along those dimensions of the mesh on which the DTensor is replicated. On the others, where it is divided,
    they have this rank's coordinate.
    """
    mesh = parameter.device_mesh
    coordinate: Any = mesh.get_coordinate()
    index: list[Any] = []
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            index.append(slice(None))
        else:
            index.append(coordinate[dimension])
    ranks = tuple(mesh.mesh[tuple(index)].flatten().tolist())
    if len(ranks) == 1:
        return ()
    return ranks


# --- the rules that compare ranks -------------------------------------------------------------------------------------


# After these mistakes the ranks' weights drift apart. If one of them is found, "drift" is not reported beside it.
CAUSES_OF_DRIFT = ("different_noise", "uneven_steps", "rank_alone", "different_start", "stale_optimizer")


def compare(records: Sequence[Record]) -> list[Finding]:
    """The findings of each rank, and those of the rules that compare ranks. There is one record for each rank."""
    ranks_of: dict[Finding, set[int]] = {}  # {a finding without its ranks: the ranks that have it}
    for record in records:
        for found in record.findings:
            ranks_of.setdefault(replace(found, ranks=()), set()).update(found.ranks)
    findings = [replace(found, ranks=tuple(sorted(ranks))) for found, ranks in ranks_of.items()]
    if len(records) > 1:
        for rule in RULES:
            findings += rule(records)
    if any(found.kind in CAUSES_OF_DRIFT for found in findings):
        findings = [found for found in findings if found.kind != "drift"]
    return list(dict.fromkeys(findings))


def listed(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 2" or "ranks 0, 1 and 2"."""
    numbers = [str(rank) for rank in sorted(ranks)]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def equal(values: Iterable[Any]) -> bool:
    """Whether all values are equal."""
    values = list(values)
    return all(value == values[0] for value in values)


def is_wrapped(records: Sequence[Record]) -> bool:
    """Whether some model is wrapped.

    Beside a wrapped model, an unwrapped one may be a reference that each rank trains alone, so nothing is said of it.
    """
    return any(len(model.data_ranks) > 1 for record in records for model in record.models.values())


def sends_by_hand(records: Sequence[Record]) -> bool:
    """Whether the script's own code sends what may be gradients or weights."""
    for record in records:
        sizes = {parameter.size for parameter in record.parameters.values()}
        if record.sent_large or not record.sent_sizes.isdisjoint(sizes):
            return True
    return False


def common_steps(records: Sequence[Record]) -> list[list[Step]]:
    """Each step that all these ranks made, in order: a list of the ranks' notes of it, in the order of the records."""
    if not records:
        return []
    tables = [{(step.optimizer, step.number): step for step in record.steps} for record in records]
    common = [key for key in tables[0] if all(key in table for table in tables)]
    return [[table[key] for table in tables] for key in common]


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
    return all(equal((step.rates, step.settings) for step in steps) for steps in common_steps(records))


def plain_replicas(records: Sequence[Record], kinds: set[str]) -> bool:
    """Whether all ranks train one unwrapped model: the same parameters, all of these kinds, with equal settings."""
    if len(records) < records[0].world_size or is_wrapped(records):
        return False
    tables = [
        {key: (parameter.kind, parameter.size) for key, parameter in record.parameters.items()} for record in records
    ]
    if not tables[0] or not equal(tables):
        return False
    return all(kind in kinds for kind, _ in tables[0].values()) and same_settings(records)


def names_of(keys: Iterable[str]) -> str:
    """The first of some parameters by name, and how many more there are."""
    names = [key.split(": ", 1)[1] for key in keys]
    if len(names) == 1:
        return names[0]
    return f"{names[0]} and {len(names) - 1} more"


def find_weights_that_differ(records: Sequence[Record]) -> list[Finding]:
    """Replicas of DDP or of a DTensor that differ. They have to begin equal, and each step has to leave them equal."""
    if not equal(record.device for record in records):
        return []  # GPUs of two kinds may round differently
    findings = []
    for (model, ranks), keys in replicated_parameters(records).items():
        holders = [record for record in records if record.rank in ranks and keys[0] in record.parameters]
        if len(holders) < 2 or left_out_steps(model, holders):
            continue
        starts = [initial_weights(record) for record in holders]
        different = [key for key in keys if not equal(start.get(key) for start in starts)]
        if different:
            place = holders[0].steps[0].place
            sentence = f"{names_of(different)} differ on {listed(ranks)} before the first step."
            findings.append(finding("different_start", place, ranks, sentence))
        elif holders[0].parameters[keys[0]].kind == "DDP":
            # A script that sends weights or gradients itself may mean its replicas to differ for some steps.
            if not any(record.sent_large for record in holders):
                findings += explain_drift(model, ranks, keys, holders)
        else:
            findings += find_gradients_that_differ(ranks, keys, holders)
    return findings


def replicated_parameters(records: Sequence[Record]) -> dict[tuple[str, tuple[int, ...]], list[str]]:
    """{(a model, the ranks that hold replicas): the keys of the parameters of which they hold them}."""
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for record in records:
        for key, parameter in record.parameters.items():
            if len(parameter.replicas) > 1:
                keys = groups.setdefault((parameter.model, parameter.replicas), [])
                if key not in keys:
                    keys.append(key)
    return groups


def explain_drift(model: str, ranks: tuple[int, ...], keys: list[str], holders: Sequence[Record]) -> list[Finding]:
    """The first step after which DDP's replicas differ, with the reason if it is known."""
    suspects: list[list[Step]] = []  # the steps of the model since the last one after which its replicas were equal
    different: list[str] = []
    for steps in common_steps(holders):
        is_sampled = not steps[0].after.keys().isdisjoint(keys)
        if is_sampled or model in steps[0].calls:
            suspects.append(steps)
        if is_sampled:
            different = [key for key in keys if not equal(step.after.get(key) for step in steps)]
            if different:
                break
            suspects = []
    if not different:
        return []
    for steps in suspects:
        reason = reason_to_drift(model, ranks, steps)
        if reason is not None:
            return [reason]
    step = suspects[-1][0]
    sentence = (
        f"{names_of(different)} differ on {listed(ranks)} after step {step.number}, although DDP made them equal."
    )
    return [finding("drift", step.place, ranks, sentence)]


def reason_to_drift(model: str, ranks: tuple[int, ...], steps: Sequence[Step]) -> Finding | None:
    """The mistake before one step after which DDP's replicas differ, or None. ``steps`` are the ranks' notes of it."""
    for step in steps:
        calls = step.calls[model]
        if calls.not_synchronized is not None:
            sentence = "The last call before optimizer.step() is inside no_sync: its gradients stay on their rank."
            return finding("not_synchronized", calls.not_synchronized, ranks, sentence)
        if calls.around is not None and not calls.synchronized:
            sentence = "The module inside DDP is called here, not DDP: no gradient is averaged before the step."
            return finding("around_the_wrapper", calls.around, ranks, sentence)
    if equal(step.rates for step in steps):
        return None
    rates = " and ".join(dict.fromkeys(f"{step.rates[0]:g}" for step in steps if step.rates))
    sentence = f"From step {steps[0].number} on, replicas use different learning rates: {rates}."
    return finding("different_rates", steps[0].place, ranks, sentence)


def find_gradients_that_differ(ranks: tuple[int, ...], keys: list[str], holders: Sequence[Record]) -> list[Finding]:
    """Replicated DTensors whose gradients differ by more than rounding explains."""
    for steps in common_steps(holders):
        largest = max((mean for step in steps for mean in step.gradient_means.values()), default=0.0)
        for key in keys:
            means = [step.gradient_means[key] for step in steps if key in step.gradient_means]
            if len(means) < len(steps):
                continue
            if max(means) - min(means) > 0.05 * largest:  # rounding, even to bfloat16, makes less of a difference
                sentence = (
                    f"The gradient of {names_of([key])} differs on {listed(ranks)}, which hold replicas of it: "
                    f"its mean size is {min(means):.2g} on one and {max(means):.2g} on another."
                )
                return [finding("drift", steps[0].place, ranks, sentence)]
    return []


def find_unwrapped(records: Sequence[Record]) -> list[Finding]:
    """A model that is not wrapped, or not over all ranks: no rank sends anything, and the ranks' weights drift apart.

    A script that averages weights every 500 steps has to be observed for more than 500, or has to allow "drift".
    """
    if sends_by_hand(records) or not equal(record.device for record in records):
        return []
    ranks = [record.rank for record in records]
    if plain_replicas(records, {"mesh of one"}):
        drifted = first_step_of_drift(records)
        if drifted is None:
            return []
        sentence = f"fully_shard divides the model over one rank, so {listed(ranks)} train models of their own."
        return [finding("mesh_of_one", drifted.place, ranks, sentence)]
    if not plain_replicas(records, {"plain"}) or not divides_one_training(records):
        return []
    drifted = first_step_of_drift(records)
    if drifted is None or not equal(initial_weights(record) for record in records):
        return []
    sentence = (
        f"The model is equal on {listed(ranks)} before the first step and differs after step {drifted.number}: "
        "nothing averages its gradients."
    )
    return [finding("drift", drifted.place, ranks, sentence)]


def first_step_of_drift(records: Sequence[Record]) -> Step | None:
    """The first step after which the ranks' weights differ for good, or None. Something may average them at times."""
    drifted = None
    for steps in common_steps(records):
        if not steps[0].after:  # the weights were not sampled
            continue
        if equal(step.after for step in steps):
            drifted = None
        elif drifted is None:
            drifted = steps[0]
    return drifted


def divides_one_training(records: Sequence[Record]) -> bool:
    """Whether the script says that the ranks train one model: it divides a dataset among them, or rank 0 saves it."""
    divides = all(any(epoch.divided and epoch.steps for epoch in record.epochs) for record in records)
    saving = [record.rank for record in records if record.saves]
    return divides or saving == [0]


def find_different_start(records: Sequence[Record]) -> list[Finding]:
    """Gradients that were averaged by hand, and are applied to weights that differ from the start."""
    if not plain_replicas(records, {"plain"}):
        return []
    starts = [initial_weights(record) for record in records]
    different = [key for key in starts[0] if not equal(start[key] for start in starts)]
    if not different:
        return []
    first_steps = [steps for steps in common_steps(records) if steps[0].before]
    for steps in first_steps:
        keys = list(steps[0].gradients)
        if not keys or not equal(step.gradients for step in steps):
            return []
        # Equal gradients that change no weight, such as zeros, were not averaged by anybody.
        if any(step.after.get(key) == step.before.get(key) for step in steps for key in keys):
            return []
    ranks = [record.rank for record in records]
    sentence = f"{listed(ranks).capitalize()} apply equal gradients to different weights: {names_of(different)}."
    return [finding("different_start", records[0].steps[0].place, ranks, sentence)]


def data_parallel_ranks(model: str, records: Sequence[Record]) -> set[int]:
    """The ranks that average the gradients of a model, so that their data should differ; empty if that is not certain.

    An unwrapped model that starts equal on all ranks counts, whether its gradients are averaged by hand or by nobody.
    """
    notes = [record.models[model] for record in records if model in record.models]
    if any(note.communicates for note in notes):
        return set()
    if notes[0].wrapper:
        return set(notes[0].data_ranks)
    if not plain_replicas(records, {"plain"}) or not equal(initial_weights(record) for record in records):
        return set()
    averages_by_hand = all(record.averages_gradients for record in records)
    if averages_by_hand or not sends_by_hand(records):
        return {record.rank for record in records}
    return set()


def common_models(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Each model that several ranks train on data of their own, with their records."""
    for model in dict.fromkeys(model for record in records for model in record.models):
        ranks = data_parallel_ranks(model, records)
        holders = [record for record in records if record.rank in ranks and model in record.models and record.steps]
        if len(holders) > 1:
            yield model, holders


def forwards_of(record: Record, model: str) -> list[Forward]:
    return [forward for forward in record.forwards if forward.model == model]


def epochs_of(record: Record, model: str) -> list[Epoch]:
    """The epochs whose batches a model was trained on."""
    return [epoch for epoch in record.epochs if model in epoch.models]


def pairs_of_calls(model: str, holders: Sequence[Record]) -> Iterator[tuple[Record, Record, list[Any]]]:
    """Each two ranks that train a model, with pairs of their calls of it: the first of both, the second of both, …."""
    for first, second in itertools.combinations(holders, 2):
        calls = zip(forwards_of(first, model), forwards_of(second, model), strict=False)  # as far as both have come
        yield first, second, list(calls)


def find_same_samples(records: Sequence[Record]) -> list[Finding]:
    """Ranks whose models get equal inputs in each call, or whose loaders give out equal indices of equal datasets."""
    findings = []
    for model, holders in common_models(records):
        for first, second, calls in pairs_of_calls(model, holders):
            batches = {mine.inputs for mine, _ in calls}
            elements = sum(mine.elements for mine, _ in calls)
            is_same = all(mine.inputs == other.inputs for mine, other in calls)
            # A benchmark may train on one batch again and again, and a few numbers may be equal by chance.
            if is_same and len(batches) > 1 and elements >= 32:
                ranks = (first.rank, second.rank)
                sentence = f"{listed(ranks).capitalize()} train on the same {len(batches)} batches."
                findings.append(finding("same_samples", source_of(first, calls[0][0]), ranks, sentence))
            else:
                findings += find_same_indices(model, first, second)
    return merged(findings)


def source_of(record: Record, forward: Forward) -> Place:
    """The line of the loop over the loader that is trained on, or else that of the model's call."""
    for epoch in record.epochs:
        if epoch.steps:
            return epoch.place
    return forward.place


def find_same_indices(model: str, first: Record, second: Record) -> list[Finding]:
    """Loaders that give two ranks the same samples. These may look different, because each rank augments its own."""
    for mine, other in zip(epochs_of(first, model), epochs_of(second, model), strict=False):
        if mine.dataset is None or (mine.dataset, mine.loader) != (other.dataset, other.loader):
            continue
        if min(mine.steps, other.steps) < 2 or mine.samples < 8:
            continue
        if equal_beginnings(mine.indices, other.indices):
            ranks = (first.rank, second.rank)
            sentence = f"The {mine.sampler} gives {listed(ranks)} the same indices of the same dataset."
            return [finding("same_samples", mine.place, ranks, sentence)]
    return []


def equal_beginnings(first: list[int], second: list[int]) -> bool:
    """Whether two lists of at least two batches are equal as far as the shorter one goes."""
    length = min(len(first), len(second))
    return length >= 2 and first[:length] == second[:length]


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, in which those of one kind at one line become one finding of all their ranks."""
    by_line: dict[tuple[str, str, int], Finding] = {}
    for found in findings:
        key = (found.kind, found.file, found.line)
        if key not in by_line:
            by_line[key] = found
            continue
        known = by_line[key]
        ranks = tuple(sorted({*known.ranks, *found.ranks}))
        # The sentence names the ranks, too.
        old = listed(known.ranks)
        new = listed(ranks)
        sentence = known.sentence.replace(old, new).replace(old.capitalize(), new.capitalize())
        by_line[key] = replace(known, ranks=ranks, sentence=sentence)
    return list(by_line.values())


def find_same_noise(records: Sequence[Record]) -> list[Finding]:
    """Ranks whose dropout begins with the same random state in each call, while their batches differ."""
    findings = []
    for model, holders in common_models(records):
        for first, second, calls in pairs_of_calls(model, holders):
            has_dropout = all(mine.noise is not None for mine, _ in calls)
            same_noise = all(mine.noise == other.noise for mine, other in calls)
            different_batches = all(mine.inputs != other.inputs for mine, other in calls)
            if len(calls) >= 3 and has_dropout and same_noise and different_batches:
                ranks = (first.rank, second.rank)
                sentence = f"{listed(ranks).capitalize()} drop the same units in each of {len(calls)} forward passes."
                findings.append(finding("same_noise", calls[0][0].place, ranks, sentence))
    return merged(findings)


def find_same_augmentation(records: Sequence[Record]) -> list[Finding]:
    """Datasets that give two ranks different samples, and draw the same random numbers for them."""
    findings = []
    for model, holders in common_models(records):
        for first, second in itertools.combinations(holders, 2):
            for mine, other in zip(epochs_of(first, model), epochs_of(second, model), strict=False):
                if draw_the_same(mine, other):
                    ranks = (first.rank, second.rank)
                    sentence = f"{listed(ranks).capitalize()} draw the same random numbers for different samples."
                    findings.append(finding("same_noise", mine.place, ranks, sentence))
    return merged(findings)


def draw_the_same(first: Epoch, second: Epoch) -> bool:
    """Whether two ranks drew the same random numbers, for different samples, in each of at least three batches."""
    # The first batch does not count: before it a sampler may draw its order.
    noise = list(zip(first.noise, second.noise, strict=False))[1:]
    indices = list(zip(first.indices, second.indices, strict=False))[1:]
    batches = min(len(noise), len(indices))
    if min(batches, first.steps, second.steps) < 3:
        return False
    same_noise = all(mine == other and mine != 0 for mine, other in noise[:batches])
    different_samples = all(mine != other for mine, other in indices[:batches])
    return same_noise and different_samples


def find_different_noise(records: Sequence[Record]) -> list[Finding]:
    """A dropout whose input is equal on two tensor-parallel ranks, and whose output is not."""
    for first, second in itertools.combinations(records, 2):
        different = []
        for mine, other in zip(first.dropouts, second.dropouts, strict=False):
            if second.rank in mine.ranks and mine.before == other.before and mine.after != other.after:
                different.append(mine)
        if len(different) >= 2:
            ranks = (first.rank, second.rank)
            sentence = f"A dropout gets the same activation on {listed(ranks)} and drops different units of it."
            return [finding("different_noise", different[0].place, ranks, sentence)]
    return []


def find_repeated_orders(records: Sequence[Record]) -> list[Finding]:
    """Two epochs of one loader, both trained on, with the same shuffled order and the same epoch's number."""
    findings = []
    for record in records:
        for earlier, later in itertools.pairwise(sorted(record.epochs, key=lambda epoch: epoch.loader)):
            if earlier.loader != later.loader or not earlier.shuffled or min(earlier.steps, later.steps) < 2:
                continue
            same_epoch = earlier.sampler_epoch == later.sampler_epoch >= 0
            if same_epoch and later.samples >= 8 and equal_beginnings(earlier.indices, later.indices):
                sentence = (
                    f"The {later.sampler} gives the same order in two epochs: its epoch stays {later.sampler_epoch}."
                )
                findings.append(finding("same_order", later.place, [record.rank], sentence))
    return merged(findings)


def wrapped_models(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Each wrapped model outside Join, with the records of the ranks that average its gradients."""
    for model in dict.fromkeys(model for record in records for model in record.models):
        holders = [record for record in records if model in record.models and record.steps]
        if not holders or any(record.models[model].joins for record in holders):
            continue
        note = holders[0].models[model]
        if note.wrapper:
            yield model, [record for record in holders if record.rank in note.data_ranks]


def find_calls_on_some_ranks(records: Sequence[Record]) -> list[Finding]:
    """A wrapped model that some ranks call more often than others before a step, as in a validation on rank 0 alone.

    These calls communicate, so they pair up with other calls of the other ranks.
    """
    for model, holders in wrapped_models(records):
        for steps in common_steps(holders):
            finding_of_step = compare_calls(model, holders, steps)
            if finding_of_step is not None:
                return [finding_of_step]
    return []


def compare_calls(model: str, holders: Sequence[Record], steps: Sequence[Step]) -> Finding | None:
    """Compare how often ranks have called a wrapped model before one step, of which ``steps`` are their notes."""
    calls = {record.rank: step.calls[model] for record, step in zip(holders, steps, strict=True) if model in step.calls}
    # If the ranks have not averaged gradients equally often, a step was left out, which is another mistake.
    if len(calls) < 2 or not equal(call.averaged for call in calls.values()):
        return None
    most = max(calls.values(), key=lambda call: call.synchronizing)
    fewest = min(calls.values(), key=lambda call: call.synchronizing)
    if most.synchronizing == fewest.synchronizing:
        return None
    place = steps[0].place
    lines_of_most_alone = [line for line in most.places if line not in fewest.places]
    if lines_of_most_alone:
        place = lines_of_most_alone[0]
    ranks = [rank for rank, call in calls.items() if call.synchronizing > fewest.synchronizing]
    sentence = (
        f"Before step {steps[0].number}, the wrapped model is called {most.synchronizing} times on "
        f"{listed(ranks)} and {fewest.synchronizing} times elsewhere."
    )
    return finding("rank_alone", place, ranks, sentence)


@dataclass(frozen=True)
class LeftOutStep:
    """A step of an optimizer that a rank did not make. ``step`` is another rank's note of it."""

    rank: int
    step: Step


def left_out_steps(model: str, holders: Sequence[Record]) -> list[LeftOutStep]:
    """The steps that some ranks made after a backward pass that averaged gradients, and others did not.

    All ranks take part in such a backward pass, so its number is the same on all ranks.
    """
    left_out = []
    optimizers = {step.optimizer for record in holders for step in record.steps if model in step.calls}
    for optimizer in sorted(optimizers):
        steps_by_backward: dict[int, dict[int, Step]] = {}  # {rank: {number of the backward pass: the step after it}}
        for record in holders:
            steps = [step for step in record.steps if step.optimizer == optimizer and model in step.calls]
            steps_by_backward[record.rank] = {step.calls[model].averaged: step for step in steps}
        if not all(steps_by_backward.values()):
            continue
        last = min(max(steps) for steps in steps_by_backward.values())  # the last one that every rank has come to
        for rank, own_steps in steps_by_backward.items():
            for others_steps in steps_by_backward.values():
                for backward, step in others_steps.items():
                    if backward <= last and backward not in own_steps:
                        left_out.append(LeftOutStep(rank, step))
    return left_out


def find_uneven_steps(records: Sequence[Record]) -> list[Finding]:
    """Steps of an optimizer that some ranks leave out, such as one that skips a step after a large loss."""
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


def find_different_buffers(records: Sequence[Record]) -> list[Finding]:
    """Replicas with different batch statistics that evaluate different data, and reduce the result."""
    evaluations: dict[tuple[str, int], dict[int, Evaluation]] = {}  # {(model, number): {rank: the rank's note}}
    for record in records:
        for evaluation in record.evaluations:
            if evaluation.reduced:
                evaluations.setdefault((evaluation.model, evaluation.number), {})[record.rank] = evaluation
    for by_rank in evaluations.values():
        ranks = list(by_rank)
        notes = list(by_rank.values())
        if len(notes) < 2 or not equal(note.weights for note in notes) or equal(note.inputs for note in notes):
            continue
        different = [name for name in notes[0].buffers if not equal(note.buffers.get(name) for note in notes)]
        if different:
            sentence = f"{different[0]} differs on {listed(ranks)}, whose results are then added up."
            return [finding("different_buffers", notes[0].place, ranks, sentence)]
    return []


def find_own_losses(records: Sequence[Record]) -> list[Finding]:
    """Rank 0 alone reads a loss, nothing small is ever reduced, and the ranks' batches differ."""
    readers = [record for record in records if record.loss_reads]
    if [record.rank for record in readers] != [0] or any(record.sent_sizes for record in records):
        return []
    for model, holders in common_models(records):
        first_batches = set()
        for record in holders:
            forwards = forwards_of(record, model)
            if len(forwards) >= 2:
                first_batches.add(forwards[0].inputs)
        if len(first_batches) == len(holders):
            sentence = "Rank 0 alone reads the loss, and no rank ever reduces one: it is the loss of rank 0's share."
            return [finding("own_loss", readers[0].loss_reads[0], [0], sentence)]
    return []


def find_same_files(records: Sequence[Record]) -> list[Finding]:
    """Files that several ranks of one host first write after the same number of steps, so at about the same time."""
    writers: dict[tuple[str, str, int], dict[int, Place]] = {}  # {(host, path, steps made): {rank: line}}
    for record in records:
        for path, save in record.saves.items():
            writers.setdefault((record.host, path, save.steps_made), {})[record.rank] = save.place
    findings = []
    for (_, path, _), lines in writers.items():
        if len(lines) > 1:
            ranks = sorted(lines)
            sentence = f"{listed(ranks).capitalize()} all write {os.path.basename(path)} at the same time."
            findings.append(finding("same_file", next(iter(lines.values())), ranks, sentence))
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


# --- the report, the context manager and the command ------------------------------------------------------------------


def mistakes_among(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that make a check fail: all but the notes."""
    return [found for found in findings if not found.is_note]


def short_name(file: str) -> str:
    """A file's name without its folder. The file of a notebook's cell is named by a number, which says nothing."""
    if "ipykernel_" in file:
        return "notebook cell"
    return os.path.basename(file)


def report(findings: Sequence[Finding], failures: Sequence[str] = ()) -> str:
    """The section on silent mistakes, as text for the screen."""
    lines = ["silent mistakes"]
    if not mistakes_among(findings):
        lines.append(f"  none of the {len(KINDS)} kinds")
    for found in sorted(findings, key=lambda found: found.is_note):
        label = "note: " if found.is_note else ""
        lines.append(f"  {label}{short_name(found.file)}:{found.line}, {listed(found.ranks)}: {found.sentence}")
        lines.append(f"    {found.cure}")
        lines.append(f"    {found.page}  (--allow {found.kind})")
    if failures:
        last = failures[0].strip().splitlines()[-1]
        lines.append(f"  The check itself failed {len(failures)} times, so it is not complete: {last}")
    return "\n".join(lines)


def check_allowed(allow: Iterable[str]) -> None:
    """Raise ValueError if one of these is not a kind of mistake."""
    unknown = sorted(set(allow) - set(KINDS))
    if unknown:
        raise ValueError(f"There is no kind {unknown[0]}. Known are {', '.join(KINDS)}.")


class TrainingCheck:
    """A check that runs, or ran. ``findings`` is None until the ranks' notes are compared.

    The ranks communicate through the store of their process group, a dictionary that one process serves. Each rank puts
    its notes there. Rank 0 compares them, prints the report, and puts the findings there for the other ranks.
    """

    number = itertools.count()  # of the checks of this process; all ranks make the same checks, in the same order

    def __init__(self, steps: int, patience: float, allow: Iterable[str]) -> None:
        check_allowed(allow)
        self.patience = patience
        self.allow = set(allow)
        self.observer = TrainingObserver(steps)
        self.findings: list[Finding] | None = None
        self.missing: list[int] = []  # ranks whose notes did not come in time
        self.prefix = f"training_check/{next(self.number)}"  # of the store's keys
        self.is_published = False

    def start(self) -> None:
        self.observer.start()
        if dist.is_initialized():
            self.observer.see_group()

    def publish(self) -> None:
        """Put this rank's notes into the store, if they are not there. The observer has stopped."""
        if not self.is_published and self.observer.store is not None:
            self.is_published = True
            self.observer.store.set(self.key(self.observer.record.rank), pickle.dumps(self.observer.record))

    def key(self, rank: int) -> str:
        return f"{self.prefix}/rank{rank}"

    def present(self) -> list[int]:
        """The ranks whose notes are in the store. Asking waits for nobody."""
        ranks = range(self.observer.record.world_size)
        return [rank for rank in ranks if self.observer.store.check([self.key(rank)])]

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A hook after each step of an optimizer.

        When this rank's observation is over, it publishes its notes. When all ranks have, rank 0 reports at once, so
        that nobody has to wait for the end of a long training.
        """
        if not self.observer.is_finished or self.observer.store is None:
            return
        self.publish()
        record = self.observer.record
        if record.rank == 0 and self.findings is None and len(self.present()) == record.world_size:
            self.compare_ranks()

    def finish(self) -> None:
        """End the observation. Wait for the other ranks' notes, or for rank 0's findings, but not beyond patience."""
        self.observer.stop()
        self.observer.remove_hooks()
        if self.findings is not None:
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
                self.compare_ranks()
            elif self.wait_for([findings_key]):
                self.findings = pickle.loads(store.get(findings_key))
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
        """On rank 0: compare the notes that have come, report, and send the findings to the other ranks."""
        store = self.observer.store
        present = self.present()
        self.missing = [rank for rank in range(self.observer.record.world_size) if rank not in present]
        self.conclude([pickle.loads(store.get(self.key(rank))) for rank in present])
        store.set(f"{self.prefix}/findings", pickle.dumps(self.findings))

    def conclude(self, records: Sequence[Record]) -> None:
        """Set the findings among these records. Rank 0 prints them, too."""
        self.findings = [found for found in compare(records) if found.kind not in self.allow]
        if self.observer.record.rank != 0:
            return
        failures = [failure for record in records for failure in record.failures]
        print(report(self.findings, failures), file=sys.stderr, flush=True)
        if self.missing:
            print(f"  {listed(self.missing)} sent no notes within {self.patience:g} s", file=sys.stderr, flush=True)


@contextmanager
def check_training(steps: int = 20, patience: float = 30, allow: Iterable[str] = ()) -> Iterator[TrainingCheck]:
    """A context around a training: it is observed until an optimizer has made ``steps`` steps.

    Enter it on every rank of a process group. Rank 0 reports to stderr as soon as all ranks have made these steps, or
    at the end of the context, where it waits at most ``patience`` seconds for the other ranks' notes, and 2 seconds
    after an exception. ``allow``: kinds of findings to leave out; an unknown one raises ValueError. At the end the
    context's value has the ``findings`` on each rank.
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
    """Run a script under torchrun as ``__main__``, and check its training."""
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
        check.observer.stop()
        if check.observer.record.world_size > 1:
            # The script may have ended its process group, and its store with it. torchrun's store is still there.
            check.observer.store, _, _ = next(dist.rendezvous("env://"))
        check.finish()
        if args.json and check.observer.record.rank == 0:
            records = [asdict(found) for found in check.findings or []]
            args.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
