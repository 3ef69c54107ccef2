"""``with check_training():`` finds mistakes of distributed training that raise no error. Off unless it is called.

Every rank runs it around its training, in an existing process group. While the first steps run, each rank notes
checksums of its batches, weights, gradients and buffers, and who called what. At the end the notes of all ranks are
compared. They travel through the group's store, never through a collective: a rank that makes fewer steps than
another, or that fails, keeps nobody waiting longer than ``patience`` seconds. A finding is reported only if it is
certain. The file needs PyTorch and the standard library alone, so a script can carry it, or be run by it:

    torchrun --nproc-per-node=2 training_check.py train.py --flags-of-the-script

First come the kinds of mistakes and the notes of a rank, then what observes a rank, then the rules that compare ranks.
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
        "notebooks/03_samplers.ipynb#a-stream-has-no-indices-to-divide",
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
    known = KINDS[kind]
    return Finding(kind, place.file, place.line, tuple(sorted(ranks)), sentence, known.cure, known.page, known.is_note)


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

    synchronizing: int  # calls in which this rank meets its peers
    averaged: int  # backward passes that averaged the gradients
    synchronized: bool = False  # since the last step
    not_synchronized: Place | None = None  # the last call before the step, if it was in no_sync
    around: Place | None = None  # a call of the wrapped module itself
    places: list[Place] = field(default_factory=list)  # of the synchronizing calls


@dataclass
class Step:
    """One step of an optimizer. ``weights`` and ``gradients`` are checksums by the parameter's key."""

    optimizer: int
    number: int
    place: Place
    rates: tuple[float, ...]
    settings: int
    calls: dict[str, Calls]
    before: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, int] = field(default_factory=dict)
    gradient_means: dict[str, float] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)


@dataclass
class Epoch:
    """One pass over a DataLoader. ``indices`` are checksums of the indices of its first batches."""

    loader: int
    place: Place
    dataset: int | None
    samples: int  # of the dataset, or 0 for a stream
    sampler: str
    divided: bool  # by a DistributedSampler
    shuffled: bool
    sampler_epoch: int
    padded_length: int  # with what the sampler added, or 0
    indices: list[int] = field(default_factory=list)
    noise: list[int] = field(default_factory=list)  # of the random states from which its first batches drew, or 0
    models: list[str] = field(default_factory=list)  # that got its batches, with gradients
    steps: int = 0  # of an optimizer, after a batch of this loader
    evaluated: int = 0  # batches that a model got without gradients


@dataclass
class Evaluation:
    """The first call of an evaluation. ``reduced``: afterwards this rank reduced or gathered a small tensor."""

    model: str
    number: int
    place: Place
    inputs: int
    weights: int
    buffers: dict[str, int]
    reduced: bool = False


@dataclass
class Dropout:
    """A dropout's input and output on a tensor-parallel rank."""

    place: Place
    ranks: tuple[int, ...]
    before: int
    after: int


@dataclass
class Record:
    """All notes of one rank."""

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
    saves: dict[str, tuple[int, Place]] = field(default_factory=dict)  # {file: (steps made, line)}
    sent_large: bool = False  # tensors that may be gradients or weights, by code that is not torch's own
    sent_sizes: set[int] = field(default_factory=set)  # of small tensors
    averages_gradients: bool = False  # by hand: it sends the gradient of each parameter
    findings: list[Finding] = field(default_factory=list)  # of which one rank can be certain alone
    failures: list[str] = field(default_factory=list)  # tracebacks of this check itself


# --- the reader's lines, and checksums --------------------------------------------------------------------------------

LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib")})
TORCH = os.path.dirname(os.path.realpath(torch.__file__))
THIS_FILE = os.path.realpath(__file__)
CHUNK = 2**23  # bytes of a tensor that are summed at once
SMALL = 16  # elements: a tensor of so many is a metric, unless a parameter has the same size
MASK = 2**64 - 1
OTHER_LIBRARIES = {"horovod", "deepspeed", "mpi4py", "colossalai", "bagua", "ray"}


@functools.cache
def is_readers(file: str) -> bool:
    """Whether a source file is the reader's, and not a library's."""
    if file.startswith("<frozen"):
        return False
    path = os.path.realpath(file)
    if path == THIS_FILE or path.startswith((TORCH, *LIBRARIES)):
        return False
    folder = os.path.dirname(THIS_FILE)  # in this project it is that of the launchers
    return os.path.basename(folder) != "helpers" or not path.startswith(folder + os.sep)


def readers_line() -> Place:
    """The innermost line of the reader's code that led here."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_readers(frame.f_code.co_filename):
            return Place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return Place("", 0)


def part_of_torch() -> str:
    """The part of torch from which a collective is called, such as "nn/parallel/distributed.py", "" for the reader."""
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
    """A 64-bit number of a tensor's bytes, on its device. Each word is multiplied by an odd number of its own."""
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
        words = nn.functional.pad(part, (0, -len(part) % 8)).view(torch.int64)
        first = number * CHUNK // 4 + 1
        mixed = words * torch.arange(first, first + 2 * len(words), 2, device=data.device)
        total += (mixed ^ (mixed >> 32)).sum()  # whole numbers wrap at 2**64
    return total


def checksums(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """The checksum of each tensor, 0 for None, with one copy from each device."""
    sums: dict[torch.device, list[torch.Tensor]] = {}
    places: list[tuple[torch.device, int] | None] = []
    for tensor in tensors:
        if tensor is None:
            places.append(None)
            continue
        total = checksum_tensor(tensor)
        on_device = sums.setdefault(total.device, [])
        places.append((total.device, len(on_device)))
        on_device.append(total)
    numbers = {device: torch.stack(totals).tolist() for device, totals in sums.items()}
    return [0 if place is None else numbers[place[0]][place[1]] for place in places]


def combined(numbers: Iterable[int]) -> int:
    total = 0
    for number in numbers:
        total = (total * 1_000_003 + number) & MASK
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
    depth = 0
    while dataset is not None:
        for name, value in getattr(dataset, "__dict__", {}).items():
            if isinstance(value, torch.Generator):
                generators[f"{depth} {name}"] = value
        dataset = getattr(dataset, "dataset", None)  # that of a Subset
        depth += 1
    states = dict(zip(generators, checksums([one.get_state() for one in generators.values()]), strict=True))
    states["random"] = crc(random.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = crc((keys.tobytes(), rest))
    return states


def crc(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def dataset_checksum(dataset: Any, depth: int = 2) -> int | None:
    """A number that differs for different data, from the tensors, lists and names that a dataset holds, or None."""
    parts: list[Any] = []
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        if isinstance(value, torch.Tensor):
            parts.append((name, tuple(value.shape), beginnings([value])))
        elif isinstance(value, (str, int, float)):
            parts.append((name, value))
        elif isinstance(value, (list, tuple, range)) and len(value) > 0:
            # A list of a million file names is told from another by its length and its ends.
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
        self.process = os.getpid()  # a DataLoader's workers are forks, and nobody reads their notes
        self.thread = threading.get_ident()
        self.busy = False  # what a hook calls is not the script's
        self.undo: list[Callable[[], None]] = []
        self.functions: dict[int, tuple[Any, Any]] = {}  # {id of the original: (original, what replaces it)}

    def is_on(self) -> bool:
        mine = os.getpid() == self.process and threading.get_ident() == self.thread
        return mine and not self.busy and bool(self.undo)

    def run(self, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a hook returns, or None if it failed."""
        self.busy = True
        try:
            return hook(*args, **kwargs)
        except Exception:
            if len(self.record.failures) < 20:
                self.record.failures.append(traceback.format_exc())
            return None
        finally:
            self.busy = False

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
        original = getattr(owner, name)
        inherited = isinstance(owner, type) and name not in vars(owner)
        setattr(owner, name, call)
        if inherited:
            self.undo.append(lambda: delattr(owner, name))
        else:
            self.undo.append(lambda: setattr(owner, name, original))
        if not isinstance(owner, type):
            self.functions[id(original)] = (original, call)

    def replace_copies(self) -> None:
        """Replace functions in all modules, because ``from torch.x import f`` copies them."""
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in self.functions and self.functions[id(value)][0] is value:
                    setattr(module, name, self.functions[id(value)][1])
                    self.undo.append(functools.partial(setattr, module, name, value))

    def remove(self) -> None:
        while self.undo:
            self.undo.pop()()


class LoaderObserver:
    """Notes which indices each DataLoader gives out, and whether its batches are trained on or evaluated."""

    def __init__(self, record: Record, patches: Patches) -> None:
        self.record = record
        self.loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.numbers = itertools.count()  # of loaders, also of those that are gone
        self.epochs: weakref.WeakKeyDictionary[Any, Epoch] = weakref.WeakKeyDictionary()  # by iterator
        self.prefetched: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()  # before its epoch
        self.streams: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self.noise = 0  # of the batch that is fetched: see Epoch
        self.drawn: Epoch | None = None  # gave the last batch, which no model got so far
        self.trained: Epoch | None = None  # gave the batch that a model got last, with gradients
        self.evaluated: Epoch | None = None  # a padded one that is finished
        iterator = dataloader_module._BaseDataLoaderIter
        patches.after(DataLoader, "__iter__", self.begin)
        patches.before(iterator, "_reset", self.end)
        patches.after(iterator, "_next_index", self.draw)
        original = iterator.__next__

        def next_batch(loader: Any) -> Any:
            try:
                batch = original(loader)
            except StopIteration:
                if patches.is_on():
                    patches.run(self.finish, loader)
                raise
            if patches.is_on():
                patches.run(self.deliver, loader, batch)
            return batch

        patches.replace(iterator, "__next__", next_batch)
        fetch = _MapDatasetFetcher.fetch

        def fetch_batch(fetcher: Any, index: Any) -> Any:
            """A loader without workers calls it here; in a worker nothing is noted."""
            before: dict[str, int] = {}
            if patches.is_on():
                before = patches.run(random_states, fetcher.dataset) or {}
            batch = fetch(fetcher, index)
            if patches.is_on():
                patches.run(self.fetched, before, fetcher.dataset)
            return batch

        patches.replace(_MapDatasetFetcher, "fetch", fetch_batch)
        patches.after(dist, "all_reduce", self.find_padding)
        patches.after(dist, "reduce", self.find_padding)

    def begin(self, iterator: Any, loader: Any) -> None:
        if loader not in self.loaders:
            self.loaders[loader] = next(self.numbers)
        number = self.loaders[loader]
        sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
        divided = isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1
        stream = isinstance(loader.dataset, IterableDataset)
        samples = 0
        if not stream and hasattr(loader.dataset, "__len__"):
            samples = len(loader.dataset)
        padded_length = 0
        if isinstance(sampler, DistributedSampler) and not sampler.drop_last and sampler.total_size != samples:
            padded_length = sampler.total_size
        epoch = Epoch(
            loader=number,
            place=readers_line(),
            dataset=dataset_checksum(loader.dataset),
            samples=samples,
            sampler=type(sampler).__name__,
            divided=divided,
            shuffled=bool(getattr(sampler, "shuffle", False)),
            sampler_epoch=getattr(sampler, "epoch", -1),
            padded_length=padded_length,
            indices=self.prefetched.pop(iterator, []),
        )
        self.epochs[iterator] = epoch
        self.record.epochs.append(epoch)
        if stream and loader.num_workers > 1:
            self.streams[iterator] = []

    def end(self, iterator: Any, *args: Any, **kwargs: Any) -> None:
        """A loader with persistent workers uses its iterator again in the next epoch."""
        self.epochs.pop(iterator, None)

    def draw(self, index: Any, iterator: Any) -> None:
        if index is None:
            return
        epoch = self.epochs.get(iterator)
        indices = self.prefetched.setdefault(iterator, []) if epoch is None else epoch.indices
        if len(indices) < 32:
            indices.append(crc(index))

    def fetched(self, before: dict[str, int], dataset: Any) -> None:
        after = random_states(dataset)
        self.noise = combined(before[name] for name in before if after.get(name) != before[name])

    def deliver(self, iterator: Any, batch: Any) -> None:
        self.drawn = self.epochs.get(iterator)
        if self.drawn is not None and len(self.drawn.noise) < 32:
            self.drawn.noise.append(self.noise)
        self.noise = 0
        batches = self.streams.get(iterator)
        if batches is None or self.drawn is None:
            return
        workers = iterator._num_workers
        batches.append(combined(checksums(list(tensors_in(batch)))))
        if len(batches) < 3 * workers:
            return
        del self.streams[iterator]
        rounds = [set(batches[first : first + workers]) for first in range(0, 3 * workers, workers)]
        repeated = all(len(batches_of_round) == 1 for batches_of_round in rounds)
        if repeated and len(set.union(*rounds)) == 3:
            sentence = f"All {workers} workers of this loader yield the same batches, one after the other."
            self.record.findings.append(finding("stream_repeated", self.drawn.place, (), sentence))

    def finish(self, iterator: Any) -> None:
        epoch = self.epochs.get(iterator)
        if epoch is None:
            return
        if epoch.padded_length >= 8 and epoch.evaluated > 0 and epoch.steps == 0:
            self.evaluated = epoch

    def model_called(self, model: str, with_gradients: bool) -> None:
        """Note what the last batch was for. A model's first call after the batch shows it."""
        if self.drawn is None:
            return
        if with_gradients:
            self.trained = self.drawn
            self.evaluated = None
            if model not in self.drawn.models:
                self.drawn.models.append(model)
        else:
            self.drawn.evaluated += 1
        self.drawn = None

    def stepped(self) -> None:
        if self.trained is not None:
            self.trained.steps += 1

    def find_padding(self, result: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        """After an evaluation: does a reduced tensor hold the number of samples with the padding?"""
        epoch = self.evaluated
        if epoch is None or result is not None or not isinstance(tensor, torch.Tensor) or tensor.numel() > SMALL:
            return
        values = local_part(tensor).flatten().tolist()
        if epoch.padded_length in values:
            added = epoch.padded_length - epoch.samples
            sentence = (
                f"The evaluation counts {epoch.padded_length} samples of {epoch.samples}: the DistributedSampler "
                f"of the loop in line {epoch.place.line} gives {added} of them twice."
            )
            self.record.findings.append(finding("counted_twice", readers_line(), (), sentence))
            self.evaluated = None


class ScalerObserver:
    """Notes in which order a GradScaler, clipping, optimizers and schedulers are called."""

    def __init__(self, record: Record, patches: Patches) -> None:
        self.record = record
        self.scaled: dict[int, Any] = {}  # scalers that scaled a loss
        self.used: set[int] = set()  # scalers whose step was called
        self.unscaled_by_hand: set[int] = set()  # scalers whose scale the script reads
        self.clips: list[tuple[set[int], Place]] = []  # since the last step: parameters, and where
        self.direct_steps: dict[int, Place] = {}  # of optimizers with a loss that some scaler scaled
        self.stepping = False  # a scaler's step calls the optimizer's
        self.stepped: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers
        self.schedulers: dict[int, Any] = {}
        self.orders: dict[int, list[str]] = {}  # in which each scheduler and its optimizer step
        self.first_steps: dict[int, Place] = {}  # of schedulers
        self.scheduler_depth = 0
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
            self.scaled[id(scaler)] = scaler

    def read_scale(self, scaler: Any) -> None:
        if part_of_torch() == "":
            self.unscaled_by_hand.add(id(scaler))

    def is_scaling(self, scaler: Any) -> bool:
        """Whether the gradients are certainly a multiple of the true ones."""
        if id(scaler) not in self.scaled or id(scaler) in self.unscaled_by_hand or scaler._scale is None:
            return False
        return value_of(scaler._scale) != 1.0

    def is_unscaled(self, scaler: Any, optimizer: Any) -> bool:
        state = scaler._per_optimizer_states.get(id(optimizer))
        return state is not None and state["stage"].name != "READY"

    def wrap_clip(self, name: str, patches: Patches) -> None:
        original = getattr(nn.utils, name)

        @functools.wraps(original)
        def clip(parameters: Any, limit: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(parameters, torch.Tensor):
                parameters = list(parameters)  # a generator gives them once, and they are needed twice
            norm = original(parameters, limit, *args, **kwargs)
            if patches.is_on():
                patches.run(self.clip, parameters, limit, norm)
            return norm

        patches.replace(nn.utils, name, clip)

    def clip(self, parameters: Any, limit: Any, norm: Any) -> None:
        """Note which gradients are clipped, unless their norm is only measured, or is below the limit."""
        if float(limit) == float("inf"):
            return
        # A DTensor's norm is not looked at, because its value would take a collective.
        if isinstance(norm, torch.Tensor) and not isinstance(norm, DTensor):
            if value_of(norm) <= float(limit):
                return
        clipped = {id(parameter) for parameter in tensors_in(parameters)}
        self.clips.append((clipped, readers_line()))

    def wrap_step(self, patches: Patches) -> None:
        original = GradScaler.step

        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if patches.is_on():
                patches.run(self.step, scaler, optimizer)
            self.stepping = True
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                self.stepping = False

        patches.replace(GradScaler, "step", step)

    def step(self, scaler: Any, optimizer: Any) -> None:
        self.used.add(id(scaler))
        self.optimizer_stepped(optimizer)
        if self.is_scaling(scaler) and not self.is_unscaled(scaler, optimizer):
            mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for clipped, place in self.clips:
                if clipped & mine:
                    scale = value_of(scaler._scale)
                    sentence = (
                        f"The gradients are clipped while they are still multiplied by the loss scale, {scale:g}."
                    )
                    self.record.findings.append(finding("clipped_while_scaled", place, (), sentence))
        self.clips = []

    def optimizer_steps(self, optimizer: Any) -> None:
        """Before an optimizer's step that no scaler calls."""
        if self.stepping:
            return
        self.clips = []
        self.optimizer_stepped(optimizer)
        for scaler in self.scaled.values():
            if self.is_scaling(scaler) and not self.is_unscaled(scaler, optimizer):
                self.direct_steps[id(scaler)] = readers_line()

    def wrap_scheduler(self, scheduler_class: Any, patches: Patches) -> None:
        original = scheduler_class.step

        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if patches.is_on() and self.scheduler_depth == 0:
                patches.run(self.scheduler_steps, scheduler)
            self.scheduler_depth += 1  # a SequentialLR steps others
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self.scheduler_depth -= 1

        patches.replace(scheduler_class, "step", step)

    def scheduler_steps(self, scheduler: Any) -> None:
        steps_made = getattr(scheduler, "_step_count", 0)
        if steps_made == 0:  # it is being built, or it counts no steps
            return
        number = id(scheduler)
        if number in self.orders:
            self.orders[number].append("scheduler")
            return
        optimizer = scheduler.optimizer
        stepped = optimizer in self.stepped or getattr(optimizer, "_opt_called", False)
        first = steps_made == 1 and scheduler.last_epoch == 0 and not stepped
        self.schedulers[number] = scheduler
        self.orders[number] = ["scheduler" if first else "later"]
        self.first_steps[number] = readers_line()

    def optimizer_stepped(self, optimizer: Any) -> None:
        self.stepped.add(optimizer)
        for number, scheduler in self.schedulers.items():
            if scheduler.optimizer is optimizer:
                self.orders[number].append("optimizer")

    def close(self) -> None:
        """Add what is certain only at the end."""
        for number, place in self.direct_steps.items():
            if number not in self.used and number not in self.unscaled_by_hand:
                sentence = "optimizer.step() applies gradients that are still multiplied by the loss scale."
                self.record.findings.append(finding("wrong_order", place, (), sentence))
        for number, order in self.orders.items():
            if order[:6] == ["scheduler", "optimizer"] * 3:
                sentence = "The scheduler steps before the optimizer, so the first learning rate is never used."
                self.record.findings.append(finding("wrong_order", self.first_steps[number], (), sentence))


class StateObserver:
    """Notes loads that fill nothing, ties between weights that break, and files that ranks write."""

    def __init__(self, record: Record, patches: Patches, steps_made: Callable[[], int]) -> None:
        self.record = record
        self.steps_made = steps_made
        # A parameter that two modules hold is a tie, a list of (module, name). Once made, it outlives the parameter.
        # The parameters are known by their ids, because torch.utils.swap_tensors refuses one with a weak reference.
        self.places: dict[int, list[tuple[weakref.ref, str]]] = {}
        self.ties: list[list[tuple[weakref.ref, str]]] = []
        self.loading = False
        self.loads: dict[int, list[tuple[bool, Place, str]]] = {}  # by the keys that were given: did any match?
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
        if not self.loading:
            self.forget_tie(module, name)  # the script itself gives this place a parameter: it decides anew
        if not isinstance(parameter, nn.Parameter):
            return
        tie = self.places.get(id(parameter), [])
        if not any(holds(place, parameter) for place in tie):
            tie = []  # of an earlier parameter with this id, which is gone
        tie.append((weakref.ref(module), name))
        self.places[id(parameter)] = tie
        if len(tie) == 2:
            self.ties.append(tie)

    def forget_tie(self, module: nn.Module, name: str) -> None:
        for tie in self.ties:
            tie[:] = [place for place in tie if place[0]() is not module or place[1] != name]

    def load(self, module: nn.Module, state: Any, strict: bool = True, *args: Any, **kwargs: Any) -> None:
        self.loading = True
        # Not state_dict(), whose hooks may communicate.
        own = {name for name, _ in itertools.chain(module.named_parameters(), module.named_buffers())}
        if strict or not own or not state:
            return
        given = sorted(state)
        example = f"it has {min(own)}, and was given {given[0]}"
        self.loads.setdefault(crc(given), []).append((not own.isdisjoint(given), readers_line(), example))

    def loaded(self, result: Any, *args: Any, **kwargs: Any) -> None:
        self.loading = False

    def load_distributed(self, result: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        planner = kwargs.get("planner")
        path = kwargs.get("checkpoint_id")
        if path is None or not os.path.isdir(path):
            return
        saved = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
        for name, part in state.items():
            if not isinstance(part, dict) or "param_groups" not in part or part.get("state"):
                continue
            if any(key.startswith(f"{name}.state.") for key in saved):
                sentence = (
                    f"The checkpoint holds the optimizer's moments, and {name!r} has no place for them: "
                    "the state of an optimizer that has made no step is empty."
                )
                self.record.findings.append(finding("nothing_restored", readers_line(), (), sentence))
        asked = {key for key, value in flat(state) if isinstance(value, torch.Tensor)}
        if getattr(planner, "allow_partial_load", False) and asked and asked.isdisjoint(saved):
            sentence = f"Not one tensor was loaded: {min(asked)} was asked for, and the checkpoint has {min(saved)}."
            self.record.findings.append(finding("nothing_restored", readers_line(), (), sentence))

    def save(self, value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(file, (str, os.PathLike)) and not os.fspath(file).startswith("/dev/"):
            path = os.path.realpath(file)
            self.record.saves.setdefault(path, (self.steps_made(), readers_line()))

    def broken_ties(self, model: nn.Module) -> Iterator[str]:
        """The names of weights of a model that were one parameter, and are no longer."""
        paths = {id(module): path for path, module in model.named_modules()}
        for tie in self.ties:
            names: dict[int, str] = {}  # of the parameters that stand at the tied places now
            for owner, name in tie:
                module = owner()
                if module is None or id(module) not in paths:
                    continue
                parameter = module._parameters.get(name)
                if parameter is not None:
                    names.setdefault(id(parameter), f"{paths[id(module)]}.{name}".lstrip("."))
            if len(names) > 1:
                yield " and ".join(names.values())

    def close(self) -> None:
        for loads in self.loads.values():
            if not any(matched for matched, _, _ in loads):
                _, place, example = loads[0]
                sentence = f"load_state_dict(strict=False) matched no key of the module: {example}."
                self.record.findings.append(finding("nothing_loaded", place, (), sentence))


def holds(place: tuple[weakref.ref, str], parameter: Any) -> bool:
    """Whether a module still has this very parameter under the name."""
    owner, name = place
    module = owner()
    return module is not None and module._parameters.get(name) is parameter


def flat(state: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dictionaries by their joined keys, as DCP names them."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class CommunicationObserver:
    """Notes whether the script's own code sends tensors, large as gradients or small as metrics."""

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
    OWN = ("nn/parallel/", "distributed/fsdp/", "distributed/_composable/", "distributed/checkpoint/", "nn/modules/")

    def __init__(self, record: Record, patches: Patches, sent: Callable[[], None]) -> None:
        self.record = record
        self.sent = sent
        self.addresses: set[int] = set()  # of the tensors that were sent since the last step
        # With DDP and ZeRO, and with DTensors, torch averages what is to be averaged.
        self.torch_averages = (*self.OWN, "distributed/optim/", "distributed/tensor/")
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
        part = part_of_torch()
        if part.startswith(self.torch_averages):
            return
        for tensor in tensors:
            pickled = tensor.dtype == torch.uint8 and tensor.numel() < 4096
            if tensor.numel() <= SMALL or pickled:
                self.record.sent_sizes.add(tensor.numel())
            else:
                self.record.sent_large = True
            if isinstance(tensor, torch.Tensor) and len(self.addresses) < 100_000:
                self.addresses.add(local_part(tensor).data_ptr())
        self.sent()


@dataclass(eq=False)
class ObservedModel:
    """A module that the training loop calls, and what is counted of it."""

    module: nn.Module
    note: Model
    name: str = ""  # once the training uses it
    calls: Calls = field(default_factory=lambda: Calls(0, 0))
    waits_for_backward: bool = False


class TrainingObserver:
    """Observes the training of one rank for ``steps`` steps of an optimizer; ``record`` has what it saw."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.record = Record()
        self.patches = Patches(self.record)
        self.store: Any = None  # of the process group
        self.models: dict[int, ObservedModel] = {}
        self.inside_ddp: weakref.WeakKeyDictionary[nn.Module, weakref.ref] = weakref.WeakKeyDictionary()
        self.active_ddp: list[nn.Module] = []
        self.depth = 0  # of module calls
        self.backward_depth = 0
        self.drops = False  # a dropout of the current forward pass draws random numbers
        self.optimizers: dict[int, Any] = {}
        self.built: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()
        self.stepping: Any = None  # the optimizer whose step runs
        self.evaluation: Evaluation | None = None
        self.is_finished = False
        self.hooks: list[Any] = []

    def start(self, note_existing: bool = True) -> None:
        """Begin to observe. ``note_existing``: look for the modules that the script has built before."""
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
        self.record.findings = [
            Finding(**{**vars(found), "ranks": (rank,)}) for found in dict.fromkeys(self.record.findings)
        ]

    def see_group(self) -> None:
        self.record.rank = dist.get_rank()
        self.record.world_size = dist.get_world_size()
        self.store = distributed_c10d._get_default_store()

    # --- calls of modules

    def wrap_module_calls(self) -> None:
        original = nn.Module.__call__
        patches = self.patches

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # While a graph is compiled, or a checkpointed part is recomputed in backward, nothing new is called.
            if torch.compiler.is_compiling() or self.backward_depth or not patches.is_on():
                return original(module, *args, **kwargs)
            is_ddp = isinstance(getattr(module, "_orig_mod", module), DistributedDataParallel)
            self.depth += 1
            forward = None
            if self.depth == 1 or is_ddp:
                forward = patches.run(self.enter, module, args, kwargs)
            elif self.inside_ddp:
                patches.run(self.check_wrapper, module)
            if is_ddp:
                self.active_ddp.append(getattr(module, "_orig_mod", module))
            try:
                output = original(module, *args, **kwargs)
                if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
                    patches.run(self.drop, module, args, output)
                if self.depth == 1 or is_ddp:
                    patches.run(self.leave, module, forward)
                return output
            finally:
                self.depth -= 1
                if is_ddp:
                    self.active_ddp.pop()

        patches.replace(nn.Module, "__call__", call)

    def observed(self, module: nn.Module) -> ObservedModel | None:
        """The notes of a module that has parameters."""
        known = self.models.get(id(module))
        if known is not None and (known.note.wrapper or not isinstance(module, FSDPModule)):
            return known
        if next(module.parameters(), None) is None:
            return None
        inner = module
        wrapper = ""
        data_ranks: tuple[int, ...] = ()
        if isinstance(module, DistributedDataParallel):
            inner = module.module
            wrapper = "DDP"
            data_ranks = tuple(dist.get_process_group_ranks(module.process_group))
            for part in inner.modules():
                self.inside_ddp[part] = weakref.ref(module)
        else:
            sharded = next((part for part in module.modules() if isinstance(part, FSDPModule)), None)
            if sharded is not None:
                wrapper = "FSDP"
                data_ranks = mesh_ranks(sharded)
        self.models[id(module)] = ObservedModel(module, Model(wrapper, data_ranks))
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

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Forward | None:
        """Before a call of a model, or of a loss or a metric, which have no parameters."""
        module = getattr(module, "_orig_mod", module)  # of torch.compile
        self.check_wrapper(module)
        model = self.observed(module)
        if model is None:
            return None
        self.use(model)
        gradients = torch.is_grad_enabled()
        self.loaders.model_called(model.name, gradients)
        self.count_call(model, gradients)
        inputs = list(tensors_in([args, kwargs]))
        if gradients:
            self.evaluation = None
        elif self.evaluation is not None or module.training:
            return None
        forward = Forward(
            model=model.name,
            place=readers_line(),
            inputs=combined(checksums(inputs)),
            elements=sum(tensor.numel() for tensor in inputs),
        )
        self.drops = False
        device = next(module.parameters()).device
        self.state_before = random_state(device)
        return forward

    def leave(self, module: nn.Module, forward: Forward | None) -> None:
        """After a call of a model."""
        if forward is None:
            return
        if not torch.is_grad_enabled():
            self.note_evaluation(getattr(module, "_orig_mod", module), forward)
            return
        if self.drops:
            forward.noise = self.state_before
        self.record.forwards.append(forward)

    def count_call(self, model: ObservedModel, gradients: bool) -> None:
        calls = model.calls
        if isinstance(model.module, DistributedDataParallel):
            join: Any = model.module._join_config
            if join.enable:
                model.note.joins = True
            if gradients and not model.module.require_backward_grad_sync:
                calls.not_synchronized = readers_line()
                return
            if not gradients and not model.module._check_sync_bufs_pre_fwd():
                return  # it communicates nothing
        elif model.note.wrapper != "FSDP":
            return
        calls.synchronizing += 1
        place = readers_line()
        if place not in calls.places:
            calls.places.append(place)
        if gradients:
            calls.not_synchronized = None
            calls.synchronized = True
            model.waits_for_backward = True

    def check_wrapper(self, module: nn.Module) -> None:
        """Note a call of a module that DDP wraps, unless DDP itself calls it."""
        wrapper = self.inside_ddp.get(module)
        ddp = wrapper() if wrapper is not None else None
        if ddp is None or ddp in self.active_ddp or not torch.is_grad_enabled():
            return
        calls = self.models[id(ddp)].calls
        if calls.around is None:
            calls.around = readers_line()

    def drop(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note a dropout: that it drew random numbers and, on tensor-parallel ranks, what it made of its input."""
        self.drops = True
        if not self.tensor_parallel_ranks or len(self.record.dropouts) >= 64 or not torch.is_grad_enabled():
            return
        given = args[0]
        if not isinstance(given, DTensor) and not isinstance(output, DTensor):
            before, after = checksums([given, output])
            self.record.dropouts.append(Dropout(readers_line(), self.tensor_parallel_ranks, before, after))

    @functools.cached_property
    def tensor_parallel_ranks(self) -> tuple[int, ...]:
        """The ranks among which the first model's matrices are divided, not by fully_shard; empty if they are not."""
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
        norms = {
            f"{path}.{name}".lstrip("."): buffer
            for path, part in module.named_modules()
            if isinstance(part, nn.modules.batchnorm._BatchNorm)
            for name, buffer in part.named_buffers(recurse=False)
        }
        number = sum(evaluation.model == forward.model for evaluation in self.record.evaluations)
        evaluation = Evaluation(
            model=forward.model,
            number=number,
            place=forward.place,
            inputs=forward.inputs,
            weights=0,
            buffers=dict(zip(norms, checksums(list(norms.values())), strict=True)),
        )
        self.evaluation = evaluation
        if norms and number < 8:
            sharded = any(isinstance(parameter, DTensor) for parameter in module.parameters())
            if not sharded:
                evaluation.weights = combined(checksums(list(module.parameters())))
            self.record.evaluations.append(evaluation)

    # --- backward, and numbers that are read

    def wrap_backward(self, name: str) -> None:
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
        """Note where the script reads a loss."""
        if tensor.dim() == 0 and tensor.grad_fn is not None and part_of_torch() in ("", "_tensor.py"):
            place = readers_line()
            if place not in self.record.loss_reads:
                self.record.loss_reads.append(place)

    def communicated(self) -> None:
        """The script's own code sends a tensor."""
        if self.depth > 0 and self.backward_depth == 0:
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
        nested = self.stepping is not None and self.stepping is not optimizer  # as in ZeroRedundancyOptimizer
        if not self.is_finished and not nested and self.patches.is_on() and not torch.compiler.is_compiling():
            self.patches.run(self.begin_step, optimizer)

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is self.stepping:
            self.stepping = None
            self.patches.run(self.end_step, optimizer)
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
        self.loaders.stepped()
        observed.steps += 1
        observed.begin(self)

    def end_step(self, optimizer: Any) -> None:
        self.optimizers[id(optimizer)].end(self)

    def find_idle_optimizers(self) -> None:
        """Optimizers whose parameters never had a gradient, because the model has others, or for another reason."""
        called = {
            id(parameter): (name, parameter)
            for model in self.models.values()
            if model.name
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad
        }
        stepped = {id(parameter) for observed in self.optimizers.values() for parameter in observed.parameters()}
        orphans = [parameter for number, (_, parameter) in called.items() if number not in stepped]
        for observed in self.optimizers.values():
            idle = [parameter for parameter in observed.parameters() if id(parameter) not in observed.with_gradient]
            stale = [parameter for parameter in idle if id(parameter) not in called]
            place = self.built.get(observed.optimizer, observed.place)
            kind = type(observed.optimizer)
            # The model's parameters are others of the same shapes. A shard has the shape of the whole, too.
            if stale and [parameter.shape for parameter in stale] == [parameter.shape for parameter in orphans]:
                name, _ = called[id(orphans[0])]
                sentence = (
                    f"{len(stale)} parameters of this {kind.__name__} are not the model's, so its steps change "
                    f"nothing: {name} of the model is in no optimizer."
                )
                self.record.findings.append(finding("stale_optimizer", place, (), sentence))
                continue
            # Optimizers of other libraries may compute updates without gradients.
            of_torch = kind.__module__.startswith("torch.optim")
            if of_torch and observed.steps >= 3 and not observed.with_gradient and not observed.unsynchronized:
                sentence = f"{observed.steps} steps of this {kind.__name__} found no gradient at any of its parameters."
                self.record.findings.append(finding("no_gradient", place, (), sentence))


class ObservedOptimizer:
    """An optimizer, and what is noted of its steps."""

    def __init__(self, optimizer: Any, index: int) -> None:
        self.optimizer = optimizer
        self.index = index
        self.steps = 0
        self.place = readers_line()
        self.keys: dict[int, str] = {}  # of its parameters, by id
        self.models: list[ObservedModel] = []  # that hold them
        self.with_gradient: set[int] = set()
        self.unsynchronized = False  # a step came while FSDP held gradients that were not reduced
        self.step: Step | None = None

    def parameters(self) -> list[Any]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def name_parameters(self, observer: TrainingObserver) -> None:
        """Give each parameter a key that is the same on all ranks, from the models that were called."""
        unknown = [parameter for parameter in self.parameters() if id(parameter) not in self.keys]
        if not unknown:
            return
        owners: dict[int, tuple[ObservedModel, str]] = {}
        for model in sorted(observer.models.values(), key=lambda model: model.note.wrapper != "DDP"):
            if not model.name and model.note.wrapper != "DDP":
                continue
            module: Any = model.module.module if model.note.wrapper == "DDP" else model.module
            for name, parameter in module.named_parameters():
                owners.setdefault(id(parameter), (model, name))
            for names in observer.states.broken_ties(module):
                sentence = f"{names} were one parameter when the model was built, and are two now."
                observer.record.findings.append(finding("untied", readers_line(), (), sentence))
        for number, parameter in enumerate(self.parameters()):
            if id(parameter) in self.keys:
                continue
            holder: ObservedModel | None = None
            owner = f"{type(self.optimizer).__name__} {self.index}"
            name = f"parameter {number}"
            if id(parameter) in owners:
                holder, name = owners[id(parameter)]
                observer.use(holder)
                owner = holder.name
                if holder not in self.models:
                    self.models.append(holder)
            key = f"{owner}: {name}"
            self.keys[id(parameter)] = key
            observer.record.parameters[key] = describe(parameter, name, owner, holder)

    def begin(self, observer: TrainingObserver) -> None:
        parameters = self.parameters()
        for parameter in parameters:
            if parameter.grad is not None:
                self.with_gradient.add(id(parameter))
        step = Step(
            optimizer=self.index,
            number=self.steps,
            place=readers_line(),
            rates=rates_of(self.optimizer),
            settings=settings_of(self.optimizer),
            calls={model.name: replace(model.calls, places=[*model.calls.places]) for model in self.models},
        )
        for model in self.models:
            self.check_sharded_gradients(model, step.place, observer)
            model.calls.synchronized = False
            model.calls.not_synchronized = None
            model.calls.around = None
        if self.steps == 1:
            step.before = self.checksums_of(parameters)
        sent = observer.communication.addresses
        gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if gradients and all(gradient.data_ptr() in sent for gradient in gradients):
            observer.record.averages_gradients = True
        sent.clear()
        if self.is_sampled(observer.steps):
            step.gradients = self.checksums_of([parameter.grad for parameter in parameters])
            step.gradient_means = self.means_of_replicated(observer.record)
        self.step = step
        observer.record.steps.append(step)

    def end(self, observer: TrainingObserver) -> None:
        for parameter in self.parameters():  # a closure may have made the gradients within the step
            if parameter.grad is not None:
                self.with_gradient.add(id(parameter))
        if self.step is not None and self.is_sampled(observer.steps):
            self.step.after = self.checksums_of(self.parameters())

    def is_sampled(self, last: int) -> bool:
        """Weights are compared after steps 1, 2, 4, 8 and so on, because a difference stays."""
        return self.steps & (self.steps - 1) == 0 or self.steps == last

    def checksums_of(self, tensors: Sequence[Any]) -> dict[str, int]:
        keys = [self.keys[id(parameter)] for parameter in self.parameters()]
        return dict(zip(keys, checksums(tensors), strict=True))

    def means_of_replicated(self, record: Record) -> dict[str, float]:
        """The mean size of each DTensor's gradient. Its replicas compute it apart, equally but for rounding."""
        means: dict[str, float] = {}
        for parameter in self.parameters():
            key = self.keys[id(parameter)]
            gradient = parameter.grad
            partial = isinstance(gradient, DTensor) and any(place.is_partial() for place in gradient.placements)
            if record.parameters[key].kind == "DTensor" and gradient is not None and not partial:
                part = local_part(gradient).detach()
                total: Any = part.float().abs().sum().tolist()
                means[key] = total / max(1, part.numel())
        return means

    def check_sharded_gradients(self, model: ObservedModel, place: Place, observer: TrainingObserver) -> None:
        """fully_shard keeps gradients that it did not reduce at the whole parameters, where no optimizer sees them."""
        for group in parameter_groups(model.module):
            for part in group.fsdp_params:
                if not holds_unreduced_gradient(part):
                    continue
                if not self.unsynchronized:
                    self.unsynchronized = True
                    sentence = "The optimizer steps while fully_shard holds gradients that it has not reduced."
                    observer.record.findings.append(finding("not_synchronized", place, (), sentence))
                return


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
    """A number that differs if two optimizers have different settings apart from the learning rate."""
    plain = (int, float, bool, str, tuple, type(None))
    return crc(
        [
            (name, value)
            for group in optimizer.param_groups
            for name, value in group.items()
            if name not in ("params", "lr", "initial_lr", "param_names") and isinstance(value, plain)
        ]
    )


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


EXACT_HOOKS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "powerSGD_hook", "batched_powerSGD_hook")


def describe(parameter: Any, name: str, owner: str, model: ObservedModel | None) -> Parameter:
    """What is known of a parameter: who holds replicas of it."""
    kind = "plain"
    replicas: tuple[int, ...] = ()
    if model is not None and isinstance(model.module, DistributedDataParallel):
        ddp = model.module
        hooks = [getattr(hook, "__name__", "") for hook, _ in getattr(ddp, "_comm_hooks", [])]
        if name not in ddp.parameters_to_ignore and all(hook in EXACT_HOOKS for hook in hooks):
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
        coordinate = mesh.get_coordinate()
        index = [
            slice(None) if placement.is_replicate() else coordinate[dimension]
            for dimension, placement in enumerate(parameter.placements)
        ]
        replicas = tuple(mesh.mesh[tuple(index)].flatten().tolist())
        if len(replicas) == 1:
            replicas = ()
    return Parameter(owner, name, kind, local_part(parameter).numel(), replicas)


# --- the rules that compare ranks -------------------------------------------------------------------------------------


CAUSES_OF_DRIFT = ("different_noise", "uneven_steps", "rank_alone", "different_start", "stale_optimizer")


def compare(records: Sequence[Record]) -> list[Finding]:
    """The findings of all ranks' records, and what only their comparison shows."""
    findings: list[Finding] = []
    alone = [found for record in records for found in record.findings]
    for found in alone:
        twins = {
            rank for other in alone if replace(other, ranks=()) == replace(found, ranks=()) for rank in other.ranks
        }
        findings.append(replace(found, ranks=tuple(sorted(twins))))
    if len(records) > 1:
        for rule in RULES:
            findings += rule(records)
    if any(found.kind in CAUSES_OF_DRIFT for found in findings):
        findings = [found for found in findings if found.kind != "drift"]
    return list(dict.fromkeys(findings))


def listed(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in sorted(ranks)]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def equal(values: Iterable[Any]) -> bool:
    values = list(values)
    return all(value == values[0] for value in values)


def is_wrapped(records: Sequence[Record]) -> bool:
    """Whether some model is wrapped. Beside it, an unwrapped one may be a reference that each rank trains alone."""
    return any(len(model.data_ranks) > 1 for record in records for model in record.models.values())


def sends_by_hand(records: Sequence[Record]) -> bool:
    """Whether the script's own code sends what may be gradients or weights."""
    for record in records:
        sizes = {parameter.size for parameter in record.parameters.values()}
        if record.sent_large or not record.sent_sizes.isdisjoint(sizes):
            return True
    return False


def steps_of(record: Record) -> dict[tuple[int, int], Step]:
    return {(step.optimizer, step.number): step for step in record.steps}


def common_steps(records: Sequence[Record]) -> list[list[Step]]:
    """Each step that all ranks made, in order, with one entry for each rank."""
    tables = [steps_of(record) for record in records]
    if not tables:
        return []
    common = [number for number in tables[0] if all(number in table for table in tables)]
    return [[table[number] for table in tables] for number in common]


def before(record: Record) -> dict[str, int]:
    """Checksums of all parameters before their optimizer's first step."""
    return {key: number for step in record.steps for key, number in step.before.items()}


def same_settings(records: Sequence[Record]) -> bool:
    """Whether the ranks' optimizers have equal settings, as replicas have, and a search for settings has not."""
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
    """Replicas that DDP or a DTensor promises: they begin equal, and each step leaves them equal."""
    if not equal(record.device for record in records):
        return []  # GPUs of two kinds may round differently
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for record in records:
        for key, parameter in record.parameters.items():
            if len(parameter.replicas) > 1:
                keys = groups.setdefault((parameter.model, parameter.replicas), [])
                if key not in keys:
                    keys.append(key)
    findings = []
    for (model, ranks), keys in groups.items():
        holders = [record for record in records if record.rank in ranks and keys[0] in record.parameters]
        if len(holders) < 2 or uneven(model, holders):
            continue
        starts = [before(record) for record in holders]
        apart = [key for key in keys if not equal(start.get(key) for start in starts)]
        if apart:
            place = holders[0].steps[0].place
            sentence = f"{names_of(apart)} differ on {listed(ranks)} before the first step."
            findings.append(finding("different_start", place, ranks, sentence))
        elif holders[0].parameters[keys[0]].kind == "DDP":
            if not any(record.sent_large for record in holders):
                findings += explain_drift(model, ranks, keys, holders)
        else:
            findings += find_gradients_that_differ(ranks, keys, holders)
    return findings


def explain_drift(model: str, ranks: tuple[int, ...], keys: list[str], holders: Sequence[Record]) -> list[Finding]:
    """The first step after which DDP's replicas differ, and why."""
    since: list[list[Step]] = []  # the steps since the last one after which they were equal
    for steps in common_steps(holders):
        if steps[0].after.keys().isdisjoint(keys):
            if model in steps[0].calls:
                since.append(steps)
            continue
        since.append(steps)
        apart = [key for key in keys if not equal(step.after.get(key) for step in steps)]
        if apart:
            break
        since = []
    else:
        return []
    for steps in since:
        for step in steps:
            calls = step.calls[model]
            if calls.not_synchronized is not None:
                sentence = "The last call before optimizer.step() is inside no_sync: its gradients stay on their rank."
                return [finding("not_synchronized", calls.not_synchronized, ranks, sentence)]
            if calls.around is not None and not calls.synchronized:
                sentence = "The module inside DDP is called here, not DDP: no gradient is averaged before the step."
                return [finding("around_the_wrapper", calls.around, ranks, sentence)]
        if not equal(step.rates for step in steps):
            rates = " and ".join(dict.fromkeys(f"{step.rates[0]:g}" for step in steps if step.rates))
            sentence = f"From step {steps[0].number} on, replicas use different learning rates: {rates}."
            return [finding("different_rates", steps[0].place, ranks, sentence)]
    step = since[-1][0]
    sentence = f"{names_of(apart)} differ on {listed(ranks)} after step {step.number}, although DDP made them equal."
    return [finding("drift", step.place, ranks, sentence)]


def find_gradients_that_differ(ranks: tuple[int, ...], keys: list[str], holders: Sequence[Record]) -> list[Finding]:
    """Replicated DTensors whose gradients differ by more than rounding explains."""
    for steps in common_steps(holders):
        largest = max((mean for step in steps for mean in step.gradient_means.values()), default=0.0)
        for key in keys:
            means = [step.gradient_means.get(key) for step in steps]
            if None in means or largest == 0.0:
                continue
            known = [mean for mean in means if mean is not None]
            if max(known) - min(known) > 0.05 * largest:
                sentence = (
                    f"The gradient of {names_of([key])} differs on {listed(ranks)}, which hold replicas of it: "
                    f"its mean size is {min(known):.2g} on one and {max(known):.2g} on another."
                )
                return [finding("drift", steps[0].place, ranks, sentence)]
    return []


def find_unwrapped(records: Sequence[Record]) -> list[Finding]:
    """A model that nobody wrapped: it begins equal on all ranks, nothing is sent, and the steps lead it apart.

    Who averages weights every 500 steps observes more than 500, or allows "drift".
    """
    if sends_by_hand(records) or not equal(record.device for record in records):
        return []
    on_one_rank = plain_replicas(records, {"mesh of one"})
    if not on_one_rank and not plain_replicas(records, {"plain"}):
        return []
    ranks = [record.rank for record in records]
    if not on_one_rank and not (equal(before(record) for record in records) and divides_one_training(records)):
        return []
    apart: list[Step] = []
    for steps in common_steps(records):
        if not steps[0].after:
            continue
        if equal(step.after for step in steps):
            apart = []  # something averages the weights now and then
        elif not apart:
            apart = steps
    if not apart:
        return []
    place = apart[0].place
    if on_one_rank:
        sentence = f"fully_shard divides the model over one rank, so {listed(ranks)} train models of their own."
        return [finding("mesh_of_one", place, ranks, sentence)]
    sentence = (
        f"The model is equal on {listed(ranks)} before the first step and differs after step {apart[0].number}: "
        "nothing averages its gradients."
    )
    return [finding("drift", place, ranks, sentence)]


def divides_one_training(records: Sequence[Record]) -> bool:
    """Whether the script says that the ranks train one model: it divides a dataset among them, or rank 0 saves it."""
    divides = all(any(epoch.divided and epoch.steps for epoch in record.epochs) for record in records)
    saving = [record.rank for record in records if record.saves]
    return divides or saving == [0]


def find_different_start(records: Sequence[Record]) -> list[Finding]:
    """Gradients that were averaged by hand, and are applied to weights that differ from the start."""
    if not plain_replicas(records, {"plain"}):
        return []
    starts = [before(record) for record in records]
    first = [steps for steps in common_steps(records) if steps[0].before]
    apart = [key for key in starts[0] if not equal(start[key] for start in starts)]
    for steps in first:
        keys = list(steps[0].gradients)
        averaged = bool(keys) and equal(step.gradients for step in steps)
        moved = all(step.after.get(key) != step.before.get(key) for step in steps for key in keys)
        if not averaged or not moved:
            return []
    if not apart:
        return []
    ranks = [record.rank for record in records]
    sentence = f"{listed(ranks).capitalize()} apply equal gradients to different weights: {names_of(apart)}."
    return [finding("different_start", records[0].steps[0].place, ranks, sentence)]


def data_parallel_ranks(model: str, records: Sequence[Record]) -> set[int]:
    """The ranks that average the gradients of a model, so that their data should differ."""
    notes = [record.models[model] for record in records if model in record.models]
    if any(note.communicates for note in notes):
        return set()
    if notes[0].wrapper:
        return set(notes[0].data_ranks)
    if not plain_replicas(records, {"plain"}) or not equal(before(record) for record in records):
        return set()
    by_hand = all(record.averages_gradients for record in records)
    if by_hand or not sends_by_hand(records):
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


def pairs_of_calls(model: str, holders: Sequence[Record]) -> Iterator[tuple[Record, Record, list[Any]]]:
    """Each two ranks that train a model, with their calls of it side by side."""
    for first, second in itertools.combinations(holders, 2):
        calls = zip(forwards_of(first, model), forwards_of(second, model), strict=False)
        yield first, second, list(calls)


def find_same_samples(records: Sequence[Record]) -> list[Finding]:
    """Ranks whose models get equal inputs in each call, or whose loaders give out equal indices of equal datasets."""
    findings = []
    for model, holders in common_models(records):
        for first, second, calls in pairs_of_calls(model, holders):
            batches = {mine.inputs for mine, _ in calls}
            elements = sum(mine.elements for mine, _ in calls)
            same = all(mine.inputs == other.inputs for mine, other in calls)
            # One batch for ever is a benchmark. And a few small numbers may be equal by chance.
            if same and len(batches) > 1 and elements >= 32:
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
    """The same samples may look different, because each rank augments them in its own way."""
    epochs = [[epoch for epoch in record.epochs if model in epoch.models] for record in (first, second)]
    for mine, other in zip(*epochs, strict=False):
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
    """Findings of pairs of ranks at one line as one finding of all these ranks."""
    together: dict[tuple[str, str, int], Finding] = {}
    for found in findings:
        key = (found.kind, found.file, found.line)
        if key in together:
            known = together[key]
            ranks = tuple(sorted({*known.ranks, *found.ranks}))
            old = listed(known.ranks)
            sentence = known.sentence.replace(old, listed(ranks)).replace(old.capitalize(), listed(ranks).capitalize())
            found = replace(known, ranks=ranks, sentence=sentence)
        together[key] = found
    return list(together.values())


def find_same_noise(records: Sequence[Record]) -> list[Finding]:
    """Ranks whose dropout begins with the same random state in each call, while their batches differ."""
    findings = []
    for model, holders in common_models(records):
        for first, second, calls in pairs_of_calls(model, holders):
            drops = all(mine.noise is not None for mine, _ in calls)
            same = all(mine.noise == other.noise for mine, other in calls)
            other_batches = all(mine.inputs != other.inputs for mine, other in calls)
            if len(calls) >= 3 and drops and same and other_batches:
                ranks = (first.rank, second.rank)
                sentence = f"{listed(ranks).capitalize()} drop the same units in each of {len(calls)} forward passes."
                findings.append(finding("same_noise", calls[0][0].place, ranks, sentence))
    return merged(findings)


def find_same_augmentation(records: Sequence[Record]) -> list[Finding]:
    """Datasets that give two ranks different samples, and draw the same random numbers for them."""
    findings = []
    for model, holders in common_models(records):
        for first, second in itertools.combinations(holders, 2):
            epochs = [[epoch for epoch in record.epochs if model in epoch.models] for record in (first, second)]
            for mine, other in zip(*epochs, strict=False):
                batches = list(zip(mine.indices, other.indices, mine.noise, other.noise, strict=False))
                batches = batches[1:]  # before the first batch a sampler may draw its order
                drawn = all(noise == others_noise != 0 for _, _, noise, others_noise in batches)
                other_samples = all(index != others_index for index, others_index, _, _ in batches)
                if len(batches) >= 3 and min(mine.steps, other.steps) >= 3 and drawn and other_samples:
                    ranks = (first.rank, second.rank)
                    sentence = f"{listed(ranks).capitalize()} draw the same random numbers for different samples."
                    findings.append(finding("same_noise", mine.place, ranks, sentence))
    return merged(findings)


def find_different_noise(records: Sequence[Record]) -> list[Finding]:
    """A dropout whose input is equal on two tensor-parallel ranks, and whose output is not."""
    for first, second in itertools.combinations(records, 2):
        apart = []
        for mine, other in zip(first.dropouts, second.dropouts, strict=False):
            if second.rank in mine.ranks and mine.before == other.before and mine.after != other.after:
                apart.append(mine)
        if len(apart) >= 2:
            ranks = (first.rank, second.rank)
            sentence = f"A dropout gets the same activation on {listed(ranks)} and drops different units of it."
            return [finding("different_noise", apart[0].place, ranks, sentence)]
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
    """Equally many averaged backward passes, but not equally many calls that communicate."""
    for model, holders in wrapped_models(records):
        for steps in common_steps(holders):
            calls = [step.calls[model] for step in steps if model in step.calls]
            if len(calls) < 2 or not equal(call.averaged for call in calls):
                continue
            if equal(call.synchronizing for call in calls):
                continue
            most = max(calls, key=lambda call: call.synchronizing)
            fewest = min(calls, key=lambda call: call.synchronizing)
            extra = [place for place in most.places if place not in fewest.places]
            place = extra[0] if extra else steps[0].place
            ranks = [
                record.rank
                for record, call in zip(holders, calls, strict=False)
                if call.synchronizing > fewest.synchronizing
            ]
            sentence = (
                f"Before step {steps[0].number}, the wrapped model is called {most.synchronizing} times on "
                f"{listed(ranks)} and {fewest.synchronizing} times elsewhere."
            )
            return [finding("rank_alone", place, ranks, sentence)]
    return []


def uneven(model: str, holders: Sequence[Record]) -> list[tuple[int, Step]]:
    """(rank, the step of another rank) for each optimizer step that a rank did not make after an averaged backward."""
    missing = []
    optimizers = {step.optimizer for record in holders for step in record.steps if model in step.calls}
    for optimizer in sorted(optimizers):
        tables = {}
        for record in holders:
            steps = [step for step in record.steps if step.optimizer == optimizer and model in step.calls]
            tables[record.rank] = {step.calls[model].averaged: step for step in steps}
        if not all(tables.values()):
            continue
        last = min(max(table) for table in tables.values())
        for rank, table in tables.items():
            for other in tables.values():
                missing += [(rank, step) for count, step in other.items() if count <= last and count not in table]
    return missing


def find_uneven_steps(records: Sequence[Record]) -> list[Finding]:
    for model, holders in wrapped_models(records):
        missing = uneven(model, holders)
        if missing:
            rank, step = missing[0]
            ranks = {rank for rank, _ in missing}
            sentence = (
                f"{listed(ranks).capitalize()} did not make the optimizer step that is step {step.number} elsewhere."
            )
            return [finding("uneven_steps", step.place, ranks, sentence)]
    return []


def find_different_buffers(records: Sequence[Record]) -> list[Finding]:
    """Replicas with different batch statistics that evaluate different data, and reduce the result."""
    evaluations: dict[tuple[str, int], list[tuple[int, Evaluation]]] = {}
    for record in records:
        for evaluation in record.evaluations:
            if evaluation.reduced:
                evaluations.setdefault((evaluation.model, evaluation.number), []).append((record.rank, evaluation))
    for pairs in evaluations.values():
        notes = [evaluation for _, evaluation in pairs]
        if len(notes) < 2 or not equal(note.weights for note in notes) or equal(note.inputs for note in notes):
            continue
        apart = [name for name in notes[0].buffers if not equal(note.buffers.get(name) for note in notes)]
        if apart:
            ranks = [rank for rank, _ in pairs]
            sentence = f"{apart[0]} differs on {listed(ranks)}, whose results are then added up."
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
    writers: dict[tuple[str, str, int], list[tuple[int, Place]]] = {}
    for record in records:
        for path, (steps_made, place) in record.saves.items():
            writers.setdefault((record.host, path, steps_made), []).append((record.rank, place))
    findings = []
    for (_, path, _), pairs in writers.items():
        if len(pairs) > 1:
            ranks = [rank for rank, _ in pairs]
            sentence = f"{listed(ranks).capitalize()} all write {os.path.basename(path)} at the same time."
            findings.append(finding("same_file", pairs[0][1], ranks, sentence))
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
    """A file's name without its folder; a kernel gives each cell of a notebook a file with a number for its name."""
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
    unknown = sorted(set(allow) - set(KINDS))
    if unknown:
        raise ValueError(f"There is no kind {unknown[0]}. Known are {', '.join(KINDS)}.")


class TrainingCheck:
    """A check that runs, or ran. ``findings`` is None until the ranks' notes are compared."""

    number = itertools.count()  # ranks make as many checks, in the same order

    def __init__(self, steps: int, patience: float, allow: Iterable[str]) -> None:
        check_allowed(allow)
        self.patience = patience
        self.allow = set(allow)
        self.observer = TrainingObserver(steps)
        self.findings: list[Finding] | None = None
        self.missing: list[int] = []  # ranks that sent no notes in time
        self.prefix = f"training_check/{next(self.number)}"
        self.is_published = False

    def start(self) -> None:
        self.observer.start()
        if dist.is_initialized():
            self.observer.see_group()

    def publish(self) -> None:
        """Put this rank's notes into the store, once its observer has stopped."""
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
        """After each step of the training: once this rank's part is over, report as soon as all ranks' parts are."""
        if self.observer.is_finished and self.observer.store is not None:
            self.publish()
            record = self.observer.record
            if record.rank == 0 and self.findings is None and len(self.present()) == record.world_size:
                self.conclude()

    def finish(self) -> None:
        """End the observation, compare on rank 0, and let the other ranks know the findings."""
        self.observer.stop()
        self.observer.remove_hooks()
        if self.findings is not None:
            return
        if self.observer.store is None:
            self.tell(compare([self.observer.record]), [self.observer.record])
            return
        try:
            self.publish()
            deadline = time.monotonic() + self.patience
            record = self.observer.record
            awaited = [self.key(rank) for rank in range(record.world_size)]
            if record.rank != 0:
                awaited = [f"{self.prefix}/findings"]
            while not self.observer.store.check(awaited) and time.monotonic() < deadline:
                time.sleep(0.02)
            if record.rank == 0:
                self.conclude()
            elif self.observer.store.check(awaited):
                self.findings = pickle.loads(self.observer.store.get(awaited[0]))
        except RuntimeError as error:  # the store has gone with the process that served it
            print(f"silent mistakes: the ranks' notes could not be compared ({error})", file=sys.stderr)

    def conclude(self) -> None:
        """On rank 0: compare the notes that have come, and report."""
        store = self.observer.store
        present = self.present()
        self.missing = [rank for rank in range(self.observer.record.world_size) if rank not in present]
        records = [pickle.loads(store.get(self.key(rank))) for rank in present]
        self.tell(compare(records), records)
        store.set(f"{self.prefix}/findings", pickle.dumps(self.findings))

    def tell(self, findings: list[Finding], records: Sequence[Record]) -> None:
        self.findings = [found for found in findings if found.kind not in self.allow]
        if self.observer.record.rank != 0:
            return
        failures = [failure for record in records for failure in record.failures]
        print(report(self.findings, failures), file=sys.stderr, flush=True)
        if self.missing:
            print(f"  {listed(self.missing)} sent no notes within {self.patience:g} s", file=sys.stderr, flush=True)


@contextmanager
def check_training(steps: int = 20, patience: float = 30, allow: Iterable[str] = ()) -> Iterator[TrainingCheck]:
    """Observe the training inside until an optimizer has made ``steps`` steps; rank 0 reports to stderr.

    On every rank of a process group. Rank 0 reports as soon as all ranks have come so far, or at the end, where it
    waits at most ``patience`` seconds for the other ranks' notes, and 2 seconds after an exception. ``allow``: kinds of
    findings to leave out. The value's ``findings`` are set on each rank at the end. Raises ValueError for an unknown
    kind.
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
    check = TrainingCheck(args.steps, 60, args.allow)
    sys.argv = [args.script, *args.flags]
    sys.path[0] = os.path.dirname(os.path.abspath(args.script))
    check.start()
    try:
        runpy.run_path(args.script, run_name="__main__")
    finally:
        check.observer.stop()
        if check.observer.record.world_size > 1:  # the script may have ended its group: ask torchrun's store
            check.observer.store, _, _ = next(dist.rendezvous("env://"))
        check.finish()
        if args.json and check.observer.record.rank == 0:
            records = [asdict(found) for found in check.findings or []]
            args.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
