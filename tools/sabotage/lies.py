"""The lies: each is a small patch of torch or of a helper, with the chapters whose cells have to notice it.

A lie about torch gets a module that has just been imported, and changes it. A lie about a helper or a chapter gets the
text of a file and returns a changed text. Every process of a sabotaged run imports this file, so it imports little.
"""

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIES: dict[str, "Lie"] = {}  # {name: Lie}, in the order of the chapters


@dataclass(frozen=True)
class Lie:
    name: str
    says: str  # the lie in plain words
    chapters: list[str]  # chapters whose cells have to notice, such as "04", or pages: "cheat_sheet"
    words: str  # a pattern that has to match in the failing cell or in the prose around it
    module: str  # the module of torch that the lie patches, or ""
    file: str  # the file of this project that the lie changes, or ""
    tell: Callable


def lie(chapters: str, words: str, module: str = "", file: str = "") -> Callable[[Callable], Callable]:
    """Register a function as a lie: it changes ``module``, or returns a changed text of ``file``."""

    def register(function: Callable) -> Callable:
        says = " ".join((function.__doc__ or "").split())
        LIES[function.__name__] = Lie(function.__name__, says, chapters.split(), words, module, file, function)
        return function

    return register


def swap(text: str, old: str, new: str, times: int = 1) -> str:
    """The text with ``new`` in place of ``old``. Raises LookupError unless ``old`` occurs ``times`` times."""
    if text.count(old) != times:
        raise LookupError(f"the lie does not apply: the file has {text.count(old)} times {old!r}, not {times}")
    return text.replace(old, new)


def instead_of(owner: Any, name: str) -> Callable[[Callable], None]:
    """Call a function instead of an attribute of ``owner``: it takes the true one, then what its caller passes.

    It keeps the true one's attributes, which torch uses.
    """

    def put(function: Callable) -> None:
        true = getattr(owner, name)
        setattr(owner, name, functools.wraps(true)(lambda *inputs, **keywords: function(true, *inputs, **keywords)))

    return put


def build_with(kind: Any, **options: Any) -> None:
    """Make a class take these options, whatever its caller passes."""

    @instead_of(kind, "__init__")
    def __init__(true: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        true(self, *inputs, **keywords | options)


def nothing(*inputs: Any, **keywords: Any) -> None:
    """Do nothing, in the place of any function or method."""


C10D = "torch.distributed.distributed_c10d"
AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent"
DDP = "torch.nn.parallel.distributed"
SAMPLER = "torch.utils.data.distributed"
SCALER = "torch.amp.grad_scaler"
FSDP = "torch.distributed.fsdp._fully_shard._fully_shard"
LAUNCH = "helpers/ranks/launch.py"
CHECKPOINT = "helpers/runtime/checkpoint.py"


# --- The first run


@lie("00", "met|wrong", file="notebooks/{chapter}")
def the_mistake_in_the_loop_is_not_made(text: str) -> str:
    """In chapter 0's loop, every rank adds up its loss, also where only rank 0 should."""
    return swap(text, r"place == \"in the loop\" and rank in callers", r"place == \"in the loop\"")


@lie("00", "connection|left", module=C10D)
def a_rank_waits_before_it_leaves(c10d: Any) -> None:
    """`destroy_process_group` waits for the other ranks."""

    @instead_of(c10d, "destroy_process_group")
    def destroy_process_group(true: Any, *inputs: Any, **keywords: Any) -> None:
        c10d.barrier()
        true(*inputs, **keywords)


@lie("00", "second.*forward", module=DDP)
def ddp_does_not_agree_on_its_buckets(parallel: Any) -> None:
    """The second `forward` of a DDP model broadcasts nothing."""

    @instead_of(parallel.DistributedDataParallel, "__init__")
    def __init__(true: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        true(self, *inputs, **keywords)
        reducer = self.reducer

        class Quiet:
            def _rebuild_buckets(self) -> bool:
                return False

            def __getattr__(self, name: str) -> Any:
                return getattr(reducer, name)

        self.reducer = Quiet()


# --- Groups, launchers, meshes


def give_ranks(agent: Any, change: Any) -> None:
    """Make torchrun's agent give each rank the environment that ``change`` returns for the right one."""

    @instead_of(agent, "start_processes")
    def start_processes(true: Any, *inputs: Any, envs: Any, **keywords: Any) -> Any:
        return true(*inputs, envs={rank: env | change(env) for rank, env in envs.items()}, **keywords)


@lie("00", "each of them its number|world of four|rank", file=LAUNCH)
def launch_returns_results_backwards(text: str) -> str:
    """`launch` returns the ranks' results in the wrong order."""
    return swap(text, "read_bytes()) for rank in range(nproc)]", "read_bytes()) for rank in reversed(range(nproc))]")


@lie("00 groups_and_meshes 02 loaders_in_practice 04", "hang|stands still|timeout|wait|never come", file=LAUNCH)
def launch_forgives_a_hang(text: str) -> str:
    """`launch` returns when a rank hangs, and says nothing."""
    line = "            raise hang(where_they_stand(folder, nproc), returned, call.timeout)"
    return swap(text, line, "            return [None] * nproc")


@lie("04 06", "rank", file=LAUNCH)
def launch_drops_a_ranks_output(text: str) -> str:
    """`launch` does not show what the last rank printed."""
    return swap(text, "in fold(outputs):", "in fold(outputs[:-1]):")


@lie("01 12", "local.rank", module=AGENT)
def local_rank_is_the_rank(agent: Any) -> None:
    """`torchrun` sets `LOCAL_RANK` to the rank, so that a second node asks for devices that it does not have."""
    give_ranks(agent, lambda env: {"LOCAL_RANK": env["RANK"]})


@lie("01", "exported", module=AGENT)
def an_exported_local_rank_wins(agent: Any) -> None:
    """`torchrun` leaves `LOCAL_RANK` as it was exported."""
    give_ranks(agent, lambda env: {"LOCAL_RANK": os.environ.get("LOCAL_RANK", env["LOCAL_RANK"])})


@lie("12", "node", module=AGENT)
def every_node_is_node_0(agent: Any) -> None:
    """`torchrun` sets `GROUP_RANK` to 0 on every node."""
    give_ranks(agent, lambda env: {"GROUP_RANK": "0"})


@lie("01", "backend|sick|gloo", file="helpers/runtime/process_group.py")
def backends_are_not_compared(text: str) -> str:
    """`start_process_group` starts though one node takes gloo and the other NCCL."""
    return swap(text, "    compare(store, rank, world_size, few or backend)\n", "")


@lie("groups_and_meshes", "group", module=C10D)
def new_group_takes_everybody(c10d: Any) -> None:
    """`new_group` makes a group of all ranks, whichever ranks it is given."""
    true = c10d.new_group
    c10d.new_group = lambda ranks=None, *inputs, **keywords: true(None, *inputs, **keywords)


@lie("12", "barrier", module=C10D)
def barrier_does_not_wait(c10d: Any) -> None:
    """`barrier` returns at once, and waits for nobody."""
    calls = []

    @instead_of(c10d, "barrier")
    def barrier(true: Any, *inputs: Any, **keywords: Any) -> Any:
        calls.append(inputs)
        return true(*inputs, **keywords) if len(calls) == 1 else None  # the first call is launch's own


@lie("12", "monitored.?barrier|roll call", module=C10D)
def monitored_barrier_blames_another_rank(c10d: Any) -> None:
    """`monitored_barrier` names the rank after the one that is missing."""
    import re

    @instead_of(c10d, "monitored_barrier")
    def monitored_barrier(true: Any, *inputs: Any, **keywords: Any) -> Any:
        try:
            return true(*inputs, **keywords)
        except RuntimeError as error:
            text = re.sub(r"Ranks? (\d)", lambda match: f"Rank {int(match[1]) + 1}", str(error))
            raise RuntimeError(text) from None


@lie("groups_and_meshes", "mesh|axis|axes", module="torch.distributed.device_mesh")
def mesh_counts_columns_first(module: Any) -> None:
    """`init_device_mesh` numbers the ranks along the first axis, so that neighbours are far apart."""

    def init_device_mesh(device_type: Any, mesh_shape: Any, *, mesh_dim_names: Any = None, **_: Any) -> Any:
        import torch

        size = torch.Size(mesh_shape).numel()
        ranks = torch.arange(size).reshape(mesh_shape[::-1]).permute(*reversed(range(len(mesh_shape))))
        return module.DeviceMesh(device_type, ranks.contiguous(), mesh_dim_names=mesh_dim_names)

    module.init_device_mesh = init_device_mesh


# --- Collectives


@lie("02 03 04 12", "all.?reduce|collective|adds? up|count|average|links", module=C10D)
def all_reduce_adds_nothing(c10d: Any) -> None:
    """`all_reduce` returns, and every rank keeps its own numbers."""

    def all_reduce(tensor: Any, op: Any = None, group: Any = None, async_op: Any = False) -> Any:
        return c10d.barrier(group=group, async_op=async_op)

    c10d.all_reduce = all_reduce


@lie("02", "AVG|operation", module=C10D)
def all_reduce_sums_where_it_should_average(c10d: Any) -> None:
    """`all_reduce` with `AVG` gives the sum."""

    @instead_of(c10d, "all_reduce")
    def all_reduce(
        true: Any, tensor: Any, op: Any = c10d.ReduceOp.SUM, group: Any = None, async_op: Any = False
    ) -> Any:
        return true(tensor, c10d.ReduceOp.SUM if op == c10d.ReduceOp.AVG else op, group, async_op)


@lie("02", "handle|async", module=C10D)
def async_all_reduce_waits(c10d: Any) -> None:
    """`all_reduce` with `async_op=True` returns when the exchange is over."""

    @instead_of(c10d, "all_reduce")
    def all_reduce(
        true: Any, tensor: Any, op: Any = c10d.ReduceOp.SUM, group: Any = None, async_op: Any = False
    ) -> Any:
        work = true(tensor, op, group, async_op)
        if async_op:
            work.wait()
        return work


@lie("02", "broadcast", module=C10D)
def broadcast_from_the_wrong_rank(c10d: Any) -> None:
    """`broadcast` sends the last rank's tensor, whichever rank is the source."""

    @instead_of(c10d, "broadcast")
    def broadcast(
        true: Any, tensor: Any, src: Any = None, group: Any = None, async_op: Any = False, group_src: Any = None
    ) -> Any:
        return true(tensor, group=group, async_op=async_op, group_src=c10d.get_world_size(group) - 1)


@lie("02", "scatter", module=C10D)
def scatter_deals_backwards(c10d: Any) -> None:
    """`scatter` gives the first part to the last rank."""

    @instead_of(c10d, "scatter")
    def scatter(true: Any, tensor: Any, scatter_list: Any = None, *inputs: Any, **keywords: Any) -> Any:
        return true(tensor, scatter_list and scatter_list[::-1], *inputs, **keywords)


@lie("02", "reduce", module=C10D)
def reduce_gives_the_sum_to_all(c10d: Any) -> None:
    """`reduce` leaves the sum on every rank."""

    def reduce(tensor: Any, dst: Any = None, op: Any = c10d.ReduceOp.SUM, group: Any = None, **keywords: Any) -> Any:
        return c10d.all_reduce(tensor, op, group, keywords.get("async_op", False))

    c10d.reduce = reduce


@lie("02", "gather", module=C10D)
def all_gather_in_the_wrong_order(c10d: Any) -> None:
    """`all_gather` puts the ranks' parts in the wrong order."""

    @instead_of(c10d, "all_gather_single")
    def all_gather_single(true: Any, output: Any, part: Any, *inputs: Any, **keywords: Any) -> Any:
        work = true(output, part, *inputs, **keywords)
        output.copy_(output.clone().view(-1, part.numel()).flip(0).view_as(output))
        return work


@lie("02", "reduce.scatter", module=C10D)
def reduce_scatter_gives_all_the_first_part(c10d: Any) -> None:
    """`reduce_scatter` gives every rank the first part of the sum."""

    def reduce_scatter_single(output: Any, whole: Any, *inputs: Any, **keywords: Any) -> Any:
        total = whole.clone()
        c10d.all_reduce(total)
        output.copy_(total.flatten()[: output.numel()].view_as(output))

    c10d.reduce_scatter_single = reduce_scatter_single


@lie("02", "all.to.all|transpos", module=C10D)
def all_to_all_does_not_transpose(c10d: Any) -> None:
    """`all_to_all` gives every rank its own parts back."""
    c10d.all_to_all_single = lambda output, whole, *inputs, **keywords: output.copy_(whole)


@lie("02", "DETAIL", module="torch.distributed")
def detail_compares_nothing(module: Any) -> None:
    """`TORCH_DISTRIBUTED_DEBUG=DETAIL` is ignored: ranks do not compare their collectives."""
    module.set_debug_level_from_env = lambda: None


@lie("02", "order|receive", module=C10D)
def receives_of_a_batch_are_turned_round(c10d: Any) -> None:
    """`batch_isend_irecv` starts the last receive first."""

    @instead_of(c10d, "batch_isend_irecv")
    def batch_isend_irecv(true: Any, operations: Any) -> Any:
        return true([*operations[::-1]] if all(each.op is c10d.irecv for each in operations) else operations)


@lie("02", "gaps", module=C10D)
def broadcast_minds_gaps(c10d: Any) -> None:
    """On gloo `broadcast` is right for a tensor with gaps, too."""

    @instead_of(c10d, "broadcast")
    def broadcast(true: Any, tensor: Any, *inputs: Any, **keywords: Any) -> Any:
        packed = tensor.contiguous()
        work = true(packed, *inputs, **keywords)
        if packed is not tensor:
            tensor.copy_(packed)
        return work


@lie("02", "reduce.scatter", module=C10D)
def reduce_scatter_is_its_own_exchange(c10d: Any) -> None:
    """On gloo `reduce_scatter` is not an all-reduce: rank 0 gets the sum, and deals it out."""

    def reduce_scatter_single(output: Any, whole: Any, *inputs: Any, **keywords: Any) -> Any:
        total = whole.contiguous().clone()
        c10d.reduce(total, 0)
        parts = [part.clone().view_as(output) for part in total.flatten().split(output.numel())]
        c10d.scatter(output, None if c10d.get_rank() else parts, 0)

    c10d.reduce_scatter_single = reduce_scatter_single


# --- Samplers and loaders


@lie("03 cheat_sheet", "set_epoch", module=SAMPLER)
def set_epoch_is_ignored(module: Any) -> None:
    """`set_epoch` is ignored: every epoch has one order."""
    module.DistributedSampler.set_epoch = nothing


@lie("03", "repeat|equally many|pad", module=SAMPLER)
def sampler_drops_its_padding(module: Any) -> None:
    """`DistributedSampler` repeats no sample, so that the ranks get unequally many."""

    @instead_of(module.DistributedSampler, "__iter__")
    def indices(true: Any, self: Any) -> Any:
        mine, size = list(true(self)), len(self.dataset)
        return iter([sample for turn, sample in enumerate(mine) if turn * self.num_replicas + self.rank < size])


@lie("03 04", "seed|one common|order|every `?world_size", module=SAMPLER)
def each_rank_shuffles_with_its_own_seed(module: Any) -> None:
    """`DistributedSampler` shuffles with another seed on each rank."""

    @instead_of(module.DistributedSampler, "__init__")
    def __init__(true: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        true(self, *inputs, **keywords)
        self.seed += self.rank


@lie("03", "augment|noise|random|seed", module="torch.utils.data._utils.worker")
def workers_draw_the_same_numbers(module: Any) -> None:
    """All workers of a loader get one seed."""

    @instead_of(module, "_worker_loop")
    def worker_loop(true: Any, *inputs: Any) -> Any:
        arguments = list(inputs)
        arguments[8] -= inputs[10]  # base_seed, to which the loop adds worker_id
        true(*arguments)


@lie("03 10", "position|resume", file="notebooks/{chapter}")
def sampler_forgets_its_position(text: str) -> str:
    """A checkpoint without the sampler: its position is saved and not restored."""
    old = r"self.epoch, self.position = state[\"epoch\"], state[\"position\"]"
    return swap(text, old, r"self.epoch, self.position = state[\"epoch\"], 0")


# --- Data loaders in real projects

LOADERS = "notebooks/loaders_in_practice.ipynb"
LOADER = "torch.utils.data.dataloader"


@lie("loaders_in_practice", "agree|stop", file=LOADERS)
def all_stop_with_the_last(text: str) -> str:
    """The generator stops all ranks with the last one, where it should stop them with the first."""
    return swap(text, r"MIN if at_end == \"stop\" else", r"MAX if at_end == \"stop\" else")


@lie("loaders_in_practice", "worker.*batch", module=LOADER)
def workers_leave_out_a_batch_that_is_not_full(module: Any) -> None:
    """A loader drops each worker's last batch if it is not full."""

    @instead_of(module.DataLoader, "__init__")
    def __init__(true: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        true(self, *inputs, **keywords | {"drop_last": keywords.get("num_workers", 0) > 1})


@lie("loaders_in_practice", "skip", module=C10D)
def ranks_gather_only_their_own_objects(c10d: Any) -> None:
    """`all_gather_object` gives each rank its own object, again and again."""

    def all_gather_object(found: Any, mine: Any, *inputs: Any, **keywords: Any) -> None:
        found[:] = [mine] * len(found)

    c10d.all_gather_object = all_gather_object


@lie("loaders_in_practice", "forkserver", module=LOADER)
def workers_are_always_forked(module: Any) -> None:
    """A loader forks its workers, whatever its `multiprocessing_context`."""

    @instead_of(module.DataLoader, "__init__")
    def __init__(true: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        true(self, *inputs, **keywords | ({"multiprocessing_context": "fork"} if keywords.get("num_workers") else {}))


@lie("loaders_in_practice", "persistent", module=LOADER)
def workers_do_not_persist(module: Any) -> None:
    """`persistent_workers` is ignored: each epoch starts new workers."""
    build_with(module.DataLoader, persistent_workers=False)


@lie("loaders_in_practice", "list|memory", file=LOADERS)
def reading_a_list_copies_nothing(text: str) -> str:
    """The list's texts are not read, so that no page of them is copied."""
    return swap(text, "            self.dataset[place]", "            self.dataset[0]")


@lie("loaders_in_practice", "tensor", file=LOADERS)
def the_two_tensors_are_a_list(text: str) -> str:
    """A worker reads the texts of a list, also where the page says two tensors."""
    return swap(text, "launch(weigh, Packed", "launch(weigh, Listed")


@lie("loaders_in_practice", "handle|pickle", module="torch.multiprocessing.reductions")
def tensors_are_pickled_whole(module: Any) -> None:
    """A tensor is not moved to shared memory when it is sent to a process: all of it is pickled."""
    module.init_reductions = nothing


@lie("loaders_in_practice", "length|longest", file=LOADERS)
def the_pool_is_not_sorted(text: str) -> str:
    """The sampler by length does not sort its pool."""
    return swap(text, "batched(sorted(pool, key=self.lengths.__getitem__), step)", "batched(pool, step)")


@lie("loaders_in_practice", "fewest tokens", file=LOADERS)
def samples_are_dealt_by_their_number(text: str) -> str:
    """Each sample goes to the rank that has the fewest samples, not the fewest tokens."""
    return swap(text, "tokens[rank] += lengths[sample]", "tokens[rank] += 1")


@lie("loaders_in_practice", "prefetch_factor", module=LOADER)
def workers_load_one_batch_ahead(module: Any) -> None:
    """`prefetch_factor` is ignored: each worker loads one batch ahead."""

    @instead_of(module.DataLoader, "__init__")
    def __init__(true: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        true(self, *inputs, **keywords)
        self.prefetch_factor = self.prefetch_factor and 1


@lie("loaders_in_practice", "larger than", file=LOADERS)
def the_batch_fits_into_shared_memory(text: str) -> str:
    """The batch that should be larger than `/dev/shm` has a megabyte."""
    return swap(text, ".expand(size + 2**20)", ".expand(2**20)")


# --- DDP


@lie("04", "broadcast|equal at the start|copies rank 0|before DDP", module=DDP)
def ddp_without_its_first_broadcast(module: Any) -> None:
    """DDP does not broadcast rank 0's weights when it is built."""
    module._sync_module_states = nothing


@lie("04", "no_sync", module=DDP)
def no_sync_that_syncs(module: Any) -> None:
    """`no_sync` sends the gradients all the same."""
    import contextlib

    module.DistributedDataParallel.no_sync = lambda self: contextlib.nullcontext()


@lie("00 04", "average|mean", module=DDP)
def ddp_adds_up_gradients(module: Any) -> None:
    """DDP adds the ranks' gradients up, and does not divide by the number of ranks."""

    @instead_of(module.DistributedDataParallel, "forward")
    def forward(true: Any, self: Any, *inputs: Any, **keywords: Any) -> Any:
        output = true(self, *inputs, **keywords)
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * module.dist.get_world_size())
        return output


@lie("04", "buffers|running", module=DDP)
def ddp_never_copies_buffers(module: Any) -> None:
    """DDP does not copy rank 0's buffers before a forward."""
    module.DistributedDataParallel._sync_buffers = nothing


@lie("04", "bucket", module=DDP)
def ddp_takes_one_bucket(module: Any) -> None:
    """DDP puts all gradients into one bucket, whatever `bucket_cap_mb` says."""
    build_with(module.DistributedDataParallel, bucket_cap_mb=1000)


@lie("04", "first bucket", module=DDP)
def ddp_first_bucket_is_as_large_as_the_others(module: Any) -> None:
    """DDP's first bucket closes at 25 MiB by default, like the others."""

    @instead_of(module.DistributedDataParallel, "__init__")
    def __init__(true: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        true(self, *inputs, **{"bucket_cap_mb": 25, **keywords})


@lie("04", "order", file="notebooks/{chapter}")
def ranks_keep_their_own_order_of_buckets(text: str) -> str:
    """In DDP by hand each rank lays its buckets out in the order of its own gradients."""
    return swap(text, "dist.broadcast(order, src=0)", "order.clone()")


@lie("04", "buffers", module=DDP)
def ddp_does_not_copy_buffers_when_built(module: Any) -> None:
    """DDP does not copy rank 0's buffers when it is built."""

    @instead_of(module, "_sync_module_states")
    def sync(true: Any, *inputs: Any, **keywords: Any) -> Any:
        return true(*inputs, **{**keywords, "broadcast_buffers": False})


@lie("04", "clip", module="torch.nn.utils.clip_grad")
def clip_grad_norm_clips_at_twice_the_norm(module: Any) -> None:
    """`clip_grad_norm_` clips at twice the norm that it is given."""

    @instead_of(module, "_clip_grads_with_norm_")
    def clip(true: Any, parameters: Any, max_norm: Any, *inputs: Any, **keywords: Any) -> Any:
        return true(parameters, 2 * max_norm, *inputs, **keywords)


@lie("04", "Join|uneven", module="torch.distributed.algorithms.join")
def join_does_not_shadow(module: Any) -> None:
    """`Join` does not shadow the collectives of the ranks that still train."""
    module.Join._get_num_nonjoined_procs = lambda self: 0


@lie("04", "sampler|step count", file="notebooks/{chapter}")
def ranks_without_a_sampler_see_other_images(text: str) -> str:
    """Without a sampler, each rank takes other images than the others."""
    return swap(text, "next(iter(DataLoader(train_set, 96)))", "next(iter(make_loader(train_set, 192, 0)))")


@lie("04", "inplace|two forwards", file="notebooks/{chapter}")
def two_batches_are_not_joined(text: str) -> str:
    """Two batches that should be joined go through the DDP model one after the other."""
    return swap(text, r"if how == \"joined\":", r"if how == \"never\":")


@lie("04", "search|unused", file="notebooks/{chapter}")
def the_gradient_to_compare_with_is_searched_for_too(text: str) -> str:
    """The DDP without a search for unused parameters searches, too."""
    return swap(text, "(everyone, {}, 3)", "(everyone, {name: True}, 3)")


@lie("04", "reentrant", module="torch.utils.checkpoint")
def checkpointing_is_always_reentrant(module: Any) -> None:
    """`checkpoint` ignores `use_reentrant=False`."""

    @instead_of(module, "checkpoint")
    def checkpoint(true: Any, *inputs: Any, **keywords: Any) -> Any:
        return true(*inputs, **keywords | {"use_reentrant": True})


@lie("04", "float16|fp16", module="torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
def the_float16_hook_sends_float32(module: Any) -> None:
    """`fp16_compress_hook` sends float32, as DDP does without a hook."""
    module.fp16_compress_hook = module.allreduce_hook


# --- Automatic mixed precision


@lie("05", "skip|overflow|back", module=SCALER)
def scaler_never_skips(module: Any) -> None:
    """`GradScaler` takes the step though a gradient is infinite."""
    module.GradScaler._maybe_opt_step = lambda self, optimizer, state, *inputs, **keywords: optimizer.step(
        *inputs, **keywords
    )


@lie("05", "unscale|scale", module=SCALER)
def unscale_does_nothing(module: Any) -> None:
    """`unscale_` leaves the gradients multiplied by the scale."""

    @instead_of(module.GradScaler, "_unscale_grads_")
    def unscale(true: Any, self: Any, optimizer: Any, inverse: Any, *inputs: Any) -> Any:
        return true(self, optimizer, inverse * 0 + 1, *inputs)


@lie("05", "scale", module=SCALER)
def scaler_does_not_scale_the_loss(module: Any) -> None:
    """`GradScaler.scale` gives the loss back as it is, and `unscale_` divides all the same."""

    def scale(self: Any, outputs: Any) -> Any:
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return outputs

    module.GradScaler.scale = scale


@lie("05", "grow", module=SCALER)
def scaler_never_grows(module: Any) -> None:
    """`GradScaler` never doubles its scale."""
    build_with(module.GradScaler, growth_interval=1_000_000)


@lie("05", "autocast|format", module="torch.amp.autocast_mode")
def autocast_is_off(module: Any) -> None:
    """`autocast` casts nothing."""
    build_with(module.autocast, enabled=False)


@lie("05", "autocast|format|bfloat16", module="torch.amp.autocast_mode")
def autocast_takes_the_other_format(module: Any) -> None:
    """`autocast` to bfloat16 computes in float16."""

    @instead_of(module.autocast, "__init__")
    def __init__(true: Any, self: Any, device_type: Any, dtype: Any = None, *inputs: Any, **keywords: Any) -> None:
        import torch

        true(self, device_type, torch.float16 if dtype is torch.bfloat16 else dtype, *inputs, **keywords)


@lie("05", "accumul|micro|share|divid", file="notebooks/05_amp.ipynb")
def accumulation_is_not_divided(text: str) -> str:
    """The training step adds up micro-batches without dividing by their number."""
    return swap(
        text, "loss = F.cross_entropy(model(part), targets) * share", "loss = F.cross_entropy(model(part), targets)"
    )


@lie("05", "transformer|saved|memory", file="notebooks/05_amp.ipynb")
def the_transformer_is_counted_in_float32(text: str) -> str:
    """The transformer's saved bytes under autocast are those in float32."""
    return swap(text, "    for kind in (brain, single)\\n", "    for kind in (single, single)\\n")


@lie("05", "float8|scale", file="notebooks/05_amp.ipynb")
def each_block_has_the_scale_of_the_tensor(text: str) -> str:
    """The blocks of MXFP8 share the scale of the whole tensor."""
    return swap(text, r"\"32 numbers\": 32}", r"\"32 numbers\": numbers.numel()}")


@lie("05 06", "clip|norm", module="torch.nn.utils.clip_grad")
def clip_grad_norm_does_not_clip(module: Any) -> None:
    """`clip_grad_norm_` returns the norm, and leaves the gradients as long as they were."""
    module._clip_grads_with_norm_ = nothing


# --- Fully sharded data parallel


def shard_with(module: Any, change: Any) -> None:
    """Make ``fully_shard`` take the options that ``change`` returns for the right ones."""

    @instead_of(module, "fully_shard")
    def fully_shard(true: Any, layer: Any, **options: Any) -> Any:
        return true(layer, **options | change(options))


@lie("06", "shard", module=FSDP)
def fully_shard_does_nothing(module: Any) -> None:
    """`fully_shard` returns the module as it was."""
    module.fully_shard = lambda layer, **_: layer


@lie("06", "bytes|stor|slice|here", module=FSDP)
def every_rank_stores_everything(module: Any) -> None:
    """`fully_shard` leaves every shard on every rank."""

    def replicated(options: Any) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = options["mesh"]
        if mesh.ndim == 1:
            mesh = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("replicate", "shard"))
        return {"mesh": mesh}

    shard_with(module, replicated)


@lie("06", "reshard|whole|gather", module=FSDP)
def parameters_are_never_resharded(module: Any) -> None:
    """`fully_shard` keeps gathered parameters until backward has used them."""
    shard_with(module, lambda options: {"reshard_after_forward": False})


@lie("06", "mean|averag|gradient", module="torch.distributed.fsdp._fully_shard._fsdp_collectives")
def fsdp_adds_up_gradients(module: Any) -> None:
    """`fully_shard` adds the ranks' gradients up, and does not divide by the number of ranks."""
    operations = module.ReduceOp.SUM, module.ReduceOp.SUM
    module._get_gradient_divide_factors = lambda *inputs, **keywords: (None, None, *operations)


@lie("06", "precision|policy|bfloat16", module=FSDP)
def mixed_precision_policy_is_ignored(module: Any) -> None:
    """`fully_shard` ignores its `MixedPrecisionPolicy`."""
    shard_with(module, lambda options: {"mp_policy": module.MixedPrecisionPolicy()})


@lie("06", "accumul|reduce", module=FSDP)
def gradient_sync_cannot_be_held_back(module: Any) -> None:
    """`set_requires_gradient_sync(False)` reduces the gradients all the same."""
    module.FSDPModule.set_requires_gradient_sync = nothing


@lie("06", "norm|clip", module="torch.nn.utils.clip_grad")
def clipping_takes_the_local_norm(module: Any) -> None:
    """`clip_grad_norm_` takes the norm of the rank's own slices for that of the gradient."""

    @instead_of(module, "_get_total_norm")
    def norm_of_slices(true: Any, tensors: Any, *inputs: Any, **keywords: Any) -> Any:
        from torch.distributed.tensor import DTensor, Replicate

        tensors = list(tensors)
        if not tensors or not isinstance(tensors[0], DTensor):
            return true(tensors, *inputs, **keywords)
        norm = true([tensor.to_local() for tensor in tensors], *inputs, **keywords)
        return DTensor.from_local(norm, tensors[0].device_mesh, [Replicate()])


@lie("06", "recomput|activation", module="torch.utils.checkpoint")
def checkpoint_keeps_all_activations(module: Any) -> None:
    """`torch.utils.checkpoint` keeps the activations, and computes nothing twice."""
    module.checkpoint = lambda function, *inputs, use_reentrant=None, **_: function(*inputs)


@lie("06", "optimizer|train", file="notebooks/06_fsdp.ipynb")
def the_early_optimizer_is_built_late(text: str) -> str:
    """The optimizer that comes before `fully_shard` is built after it."""
    return swap(text, "    if optimizer_first:\\n", "    if False:\\n")


@lie("06", "peak|block", module="torch.distributed._tools.fsdp2_mem_tracker")
def the_peak_is_what_is_left(module: Any) -> None:
    """`FSDPMemTracker` reports what is alive after the step for the peak."""

    @instead_of(module.FSDPMemTracker, "get_tracker_snapshot")
    def get_tracker_snapshot(true: Any, self: Any, kind: str = "current") -> Any:
        return true(self, "current")


# --- FSDP2 in a real project

PRACTICE = "notebooks/fsdp_in_practice.ipynb"


@lie("fsdp_in_practice", "equal|bit", file=PRACTICE)
def slices_by_hand_are_summed_not_averaged(text: str) -> str:
    """FSDP by hand adds the gradients up, and does not divide by the number of ranks."""
    return swap(text, "return mine / dist.get_world_size()", "return mine")


@lie("fsdp_in_practice", "free|alive|whole", file=PRACTICE)
def gathered_weights_by_hand_are_kept(text: str) -> str:
    """FSDP by hand keeps the gathered weights of each block until backward."""
    return swap(text, "!= storage:", "!= 0:")


@lie("fsdp_in_practice", "tie|shared", module="torch.distributed.fsdp._fully_shard._fsdp_state")
def a_parameter_may_be_in_two_groups(module: Any) -> None:
    """FSDP does not look whether two groups share a parameter."""
    module.FSDPState._validate_no_duplicate_params = nothing


@lie("fsdp_in_practice", "unused|branch|group", module=FSDP)
def unused_parameters_are_left_out(module: Any) -> None:
    """`set_reduce_scatter_unused_params` changes nothing."""
    module.FSDPModule.set_reduce_scatter_unused_params = nothing


@lie("fsdp_in_practice", "regist|method", module=FSDP)
def no_method_can_be_registered(module: Any) -> None:
    """`register_fsdp_forward_method` changes nothing."""
    module.register_fsdp_forward_method = nothing


@lie("fsdp_in_practice", "divi|token", module=FSDP)
def the_divide_factor_is_ignored(module: Any) -> None:
    """`set_gradient_divide_factor` changes nothing."""
    module.FSDPModule.set_gradient_divide_factor = nothing


@lie("fsdp_in_practice", "all-reduce|node", module=FSDP)
def each_micro_batch_is_reduced_between_nodes(module: Any) -> None:
    """`set_requires_all_reduce(False)` reduces between replicas all the same."""
    module.FSDPModule.set_requires_all_reduce = nothing


@lie("fsdp_in_practice", "Muon|matri", module="torch.optim._muon")
def muon_iterates_four_times(module: Any) -> None:
    """Muon multiplies its momentum four times, not five."""
    build_with(module.Muon, ns_steps=4)


@lie("fsdp_in_practice", "recomput|keep|kept", module="torch.utils.checkpoint")
def the_policy_of_a_checkpoint_is_ignored(module: Any) -> None:
    """`create_selective_checkpoint_contexts` ignores its policy, and all is computed again."""
    module.create_selective_checkpoint_contexts = lambda *inputs, **keywords: module.noop_context_fn()


@lie("fsdp_in_practice", "token|text", file=PRACTICE)
def ranks_do_not_ask_before_a_token(text: str) -> str:
    """A rank whose text is done leaves, and does not ask the others."""
    return swap(text, "dist.all_reduce(going)  # is any rank still going?", "pass")


@lie("fsdp_in_practice", "token", file=PRACTICE)
def the_loss_of_all_tokens_is_not_multiplied(text: str) -> str:
    """The loss that is divided by all tokens is not multiplied by the number of ranks."""
    return swap(text, "loss = loss / total * dist.get_world_size()", "loss = loss / total")


@lie("fsdp_in_practice", "dtype", module="torch.distributed.fsdp._fully_shard._fsdp_param_group")
def a_group_may_train_two_dtypes(module: Any) -> None:
    """FSDP does not look whether the trained parameters of a group have one dtype."""

    @instead_of(module.FSDPParamGroup, "_init_mp_dtypes")
    def init(true: Any, self: Any) -> None:
        try:
            true(self)
        except AssertionError:
            self._orig_dtype = self._reduce_dtype = None


@lie("fsdp_in_practice", "nan|norm", module="torch.nn.utils.clip_grad")
def a_norm_of_nan_is_accepted(module: Any) -> None:
    """`clip_grad_norm_` ignores `error_if_nonfinite`."""

    @instead_of(module, "_get_total_norm")
    def norm(true: Any, gradients: Any, norm_type: Any = 2.0, strict: Any = False, foreach: Any = None) -> Any:
        return true(gradients, norm_type, False, foreach)


# --- Checkpoints


@lie("10", "HSDP|write|slice", module="torch.distributed.checkpoint.default_planner")
def the_lowest_rank_writes_every_copy(module: Any) -> None:
    """Of the ranks that hold a slice, the lowest one writes it, however much that rank has to write already."""
    true = module.dedup_save_plans
    module.dedup_save_plans = lambda plans, _: true(plans, True)


@lie("10 old_code", "load|resume|same bits", module="torch.distributed.checkpoint.state_dict_loader")
def dcp_load_loads_nothing(module: Any) -> None:
    """`dcp.load` returns, and the tensors hold what they held."""
    module.load = nothing


@lie("10 11", "optimizer|momentum|same bits|every bit", module="torch.optim.optimizer")
def optimizer_is_not_restored(module: Any) -> None:
    """A checkpoint without the optimizer: a resume begins with fresh momenta."""
    module.Optimizer.load_state_dict = nothing


@lie("checkpoints_in_practice", "scaler", module=SCALER)
def scaler_is_not_restored(module: Any) -> None:
    """A checkpoint without the gradient scaler: a resume begins with a scale of 65,536."""
    module.GradScaler.load_state_dict = nothing


@lie("10", "random|same bits", module="torch.random")
def generator_is_not_restored(module: Any) -> None:
    """A checkpoint without the random numbers: `set_rng_state` does nothing."""
    module.set_rng_state = nothing


@lie("10", "schedule|learning rate", module="torch.optim.lr_scheduler")
def schedule_starts_again(module: Any) -> None:
    """A checkpoint without the schedule: after a resume the learning rate starts again."""
    module.LRScheduler.load_state_dict = nothing


@lie("checkpoints_in_practice", "async_save|thread", module="torch.distributed.checkpoint.state_dict_saver")
def async_save_copies_nothing(module: Any) -> None:
    """`dcp.async_save` does not copy: its thread waits a little, and writes what training has changed."""
    module.DefaultStager.stage = lambda self, state, **keywords: state

    @instead_of(module._ThreadBasedAsyncCheckpointExecutor, "execute_save")
    def execute_save(true: Any, self: Any, *inputs: Any, **keywords: Any) -> Any:
        from concurrent.futures import ThreadPoolExecutor
        from time import sleep

        def later() -> Any:
            sleep(1)
            return true(self, *inputs, **keywords).result()

        return ThreadPoolExecutor(1).submit(later)


@lie("10", "half|killed|damage|whole", file=CHECKPOINT)
def half_a_file_counts(text: str) -> str:
    """A torn write: half of a file is written, and it counts as saved."""
    line = "    replace_file(path, lambda file: torch.save(state, file))"
    return swap(text, line, f"{line}\n    os.truncate(path, os.stat(path).st_size // 2)")


@lie("10", "fail|disk|raise|finish", file=CHECKPOINT)
def failed_save_counts(text: str) -> str:
    """A checkpoint counts though one rank could not write its part."""
    return swap(text, "            if failure:\n", "            if False:\n")


@lie("10", "newest|keep|last", file=CHECKPOINT)
def retention_deletes_the_newest(text: str) -> str:
    """Of more than `keep` checkpoints the newest are deleted."""
    return swap(text, "finished(path.parent)[: -max(keep, 1)]", "finished(path.parent)[max(keep, 1) :]")


@lie("10", "flip|checksum|bit", file=CHECKPOINT)
def digests_are_not_compared(text: str) -> str:
    """`verify` accepts any bytes of the right length."""
    return swap(text, "            if digest != manifest[name][1]:", "            if False:")


@lie("10", "truncat|length|gone|damage", file=CHECKPOINT)
def damaged_checkpoint_is_taken(text: str) -> str:
    """`latest_good` takes the newest checkpoint, damaged or not."""
    return swap(text, "        if not (problem := damage(path)):", "        if not (problem := None):")


@lie("10", "execut|weights_only|hostile|program", file=CHECKPOINT)
def load_file_executes_what_it_reads(text: str) -> str:
    """`load_file` loads with `weights_only=False`, and so executes what a file says."""
    return swap(text, "weights_only=True, mmap=True", "weights_only=False, mmap=True")


@lie("10", "copy|background|start of the save", file=CHECKPOINT)
def background_save_copies_nothing(text: str) -> str:
    """A save in the background writes tensors that training goes on to change."""
    return swap(text, "copy = BlockingAsyncStager().stage(state)  # on the CPU", "copy = state")


@lie("10", "sync|disk", file=CHECKPOINT)
def a_file_is_renamed_before_it_is_on_the_disk(text: str) -> str:
    """A checkpoint's file is renamed without a wait for the disk."""
    return swap(text, "            os.fsync(self.fileno())\n", "")


@lie("10", "random|same bits", file="notebooks/{chapter}")
def all_ranks_get_the_generators_of_rank_0(text: str) -> str:
    """A resume gives all ranks the random states of rank 0 in Python and NumPy."""
    states, mine = '[\\"random\\"]', "[dist.get_rank()]"
    mixed = f'{{**plain{states}[0], \\"cpu\\": plain{states}{mine}[\\"cpu\\"]}}'
    return swap(text, f"set_random_state(plain{states}{mine}", f"set_random_state({mixed}")


@lie("10", "piece|forget", file="notebooks/{chapter}")
def the_scheduler_is_forgotten_with_the_optimizer(text: str) -> str:
    """Where the scheduler alone should be forgotten, the optimizer is."""
    piece = '(\\"optimizer\\" if piece == \\"scheduler\\" else piece)'
    old = "getattr(run, piece).load_state_dict(fresh[piece])"
    return swap(text, old, f"getattr(run, {piece}).load_state_dict(fresh[{piece}])")


# --- Checkpoints in real projects

SAVED = "torch.distributed.checkpoint.state_dict"
REAL = "notebooks/checkpoints_in_practice.ipynb"


@lie("checkpoints_in_practice", "frozen|freeze", module=SAVED)
def frozen_parameters_keep_their_state(module: Any) -> None:
    """A load restores the optimizer's state of frozen parameters too."""

    def thawed(true: Any, model: Any, *inputs: Any, **keywords: Any) -> Any:
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        result = true(model, *inputs, **keywords)
        for parameter in frozen:
            parameter.requires_grad_(False)
        return result

    for name in ("get_state_dict", "set_state_dict"):
        instead_of(module, name)(thawed)


@lie("checkpoints_in_practice", "float|flatten", module=SAVED)
def the_flattened_form_names_what_is_missing(module: Any) -> None:
    """With `flatten_optimizer_state_dict=True` the error names the parameter whose state is missing."""

    @instead_of(module, "_unflatten_optim_state_dict")
    def unflatten(true: Any, optim: Any, state: Any, info: Any) -> Any:
        for names in info.fqn_param_mapping.values():
            for name in names if isinstance(names, set) else ():
                if not any(key.startswith(f"state.{name}.") for key in state):
                    raise RuntimeError(f"Missing optimizer state for parameter '{name}' in checkpoint.")
        return true(optim, state, info)


@lie("checkpoints_in_practice", "exactly|state", file=REAL)
def load_exactly_keeps_the_state_that_torch_made(text: str) -> str:
    """`load_exactly` keeps the optimizer's state of the zero step where the file has none."""
    return swap(text, "optimizer.state.pop(parameter, None)", "pass")


@lie("checkpoints_in_practice", "safetensors|slices", module="torch.distributed.checkpoint.hf_storage")
def safetensors_are_not_read(module: Any) -> None:
    """`HuggingFaceStorageReader` reads nothing: the tensors hold what they held."""
    module.HuggingFaceStorageReader._process_read_request = nothing


@lie("checkpoints_in_practice", "joins|joined", module="torch.distributed.checkpoint.hf_storage")
def slices_are_not_joined(module: Any) -> None:
    """`HuggingFaceStorageWriter` ignores `enable_consolidation`."""
    module.consolidate_safetensors_files = nothing


@lie("checkpoints_in_practice", "memory|copies", module="torch.distributed.checkpoint.staging")
def copies_of_async_saves_are_kept(module: Any) -> None:
    """`dcp.async_save` keeps its copy of the tensors after the save."""
    kept = []

    @instead_of(module.BlockingAsyncStager, "stage")  # which a FileSystemWriter is
    def stage(true: Any, *inputs: Any, **keywords: Any) -> Any:
        kept.append(true(*inputs, **keywords))
        return kept[-1]


@lie("checkpoints_in_practice", "prefix|_orig_mod", module="torch.distributed.checkpoint.state_dict")
def names_keep_the_compilers_prefix(module: Any) -> None:
    """`get_model_state_dict` leaves `_orig_mod.` in the names."""

    @instead_of(module, "_get_fqns")
    def _get_fqns(true: Any, *inputs: Any, **keywords: Any) -> Any:
        return true(*inputs, **keywords | {"skip_compiler_prefix": False})


# --- Trainer, restarts, nodes


@lie("11", "dropout|random", file="notebooks/{chapter}")
def all_ranks_draw_the_same_noise(text: str) -> str:
    """In a step, all ranks and micro-batches are seeded alike."""
    slot = "step, dist.get_rank() + ranks * part)"
    return swap(text, slot, "step, 0)", times=text.count(slot))


@lie("16", "mesh|share|dp|group", module="torch.distributed.device_mesh")
def a_dimension_of_a_mesh_is_the_world(module: Any) -> None:
    """`DeviceMesh.get_group` gives the group of all ranks, whatever dimension was asked for."""
    module.DeviceMesh.get_group = lambda *_, **__: module._get_default_group()


@lie("11", "stop|signal|schedul", file="notebooks/{chapter}")
def stop_request_hears_nothing(text: str) -> str:
    """`StopRequest` does not note the signal."""
    return swap(text, "self.numbers.append(number)", "None", times=text.count("self.numbers.append(number)"))


@lie("11", "stop|signal|agree", file="notebooks/{chapter}")
def one_signalled_rank_is_outvoted(text: str) -> str:
    """The ranks stop when all of them have got the signal, and not when one has."""
    return swap(text, "dist.ReduceOp.MAX", "dist.ReduceOp.MIN", times=text.count("dist.ReduceOp.MAX"))


@lie("11", "BatchNorm|broken|finite", file="notebooks/{chapter}")
def batchnorm_keeps_a_nan(text: str) -> str:
    """A step that is skipped leaves the running statistics of BatchNorm as the forward left them."""
    old = "torch.where(norm.isfinite(), buffer, before)"
    return swap(text, old, "buffer", times=text.count(old))


@lie("11", "TensorBoard|log|curve", file="notebooks/{chapter}")
def the_log_has_the_highest_rate(text: str) -> str:
    """The log has the highest learning rate in each line, and not that of its step."""
    old = '\\"lr\\": peaks[0] * factor'
    return swap(text, old, '\\"lr\\": peaks[0]', times=text.count(old))


@lie("11", "compil", file="notebooks/{chapter}")
def compile_in_place_reaches_no_backend(text: str) -> str:
    """`--compile-with` calls `model.compile()`, which does not compile an `nn.Sequential`."""
    old = "model.forward = torch.compile(model.forward, backend=args.compile_with)"
    return swap(text, old, "model.compile(backend=args.compile_with)", times=text.count(old))


# --- Trainers in real projects

TRAINERS = "notebooks/trainers_in_practice.ipynb"


@lie("trainers_in_practice", "run|log", file=TRAINERS)
def every_rank_opens_the_log(text: str) -> str:
    """Every rank opens the log, also where rank 0 alone should."""
    return swap(text, "open_log(folder) if every_rank or rank == 0 else None", "open_log(folder)")


@lie("trainers_in_practice", "warm|compile", file=TRAINERS)
def nothing_is_compiled_before_the_barrier(text: str) -> str:
    """The warm-up runs no forward: each rank compiles in its first step with others."""
    return swap(text, "model(x).sum().backward()  # the bare module: nothing is sent", "pass")


@lie("trainers_in_practice", "timeout|compile", module="torch.distributed.distributed_c10d")
def a_timeout_cannot_be_lowered(module: Any) -> None:
    """`_set_pg_timeout` changes nothing."""
    module._set_pg_timeout = nothing


@lie("trainers_in_practice", "compile", module="torch.compiler")
def guard_collectives_do_nothing(module: Any) -> None:
    """`torch.compiler.set_enable_guard_collectives` changes nothing."""
    module.set_enable_guard_collectives = nothing


@lie("trainers_in_practice", "compile", file=TRAINERS)
def a_forward_is_compiled_in_place(text: str) -> str:
    """`model.compile()` is called in place of the compilation of `model.forward`."""
    return swap(text, "model.forward = torch.compile(model.forward, backend=backend)", "model.compile(backend=backend)")


@lie("trainers_in_practice", "fingerprint|bits", file=TRAINERS)
def all_fingerprints_are_equal(text: str) -> str:
    """A fingerprint depends on a gradient's size only."""
    return swap(text, "hashlib.sha256(data.numpy())", "hashlib.sha256(bytes(len(data)))")


@lie("13", "restart|start|snapshot|going on", file="notebooks/13_fault_tolerance.ipynb")
def restart_starts_anew(text: str) -> str:
    """A restarted script finds no snapshot, and trains from step 0."""
    return swap(text, "    return max(found)", "    return found[0]")


@lie("13", "restart", module=AGENT)
def restarts_are_not_counted(agent: Any) -> None:
    """`torchrun` tells every start that it is the first."""
    give_ranks(agent, lambda env: {"TORCHELASTIC_RESTART_COUNT": "0"})


@lie("13", "restart", module="torch.distributed.launcher.api")
def torchrun_never_restarts(module: Any) -> None:
    """`torchrun` ignores `--max-restarts`."""

    @instead_of(module, "launch_agent")
    def launch_agent(true: Any, config: Any, *inputs: Any, **keywords: Any) -> Any:
        config.max_restarts = 0
        return true(config, *inputs, **keywords)


@lie("13", "status|restart|fail", module="torch.distributed.launcher.api")
def failure_has_status_0(module: Any) -> None:
    """`torchrun` ends with status 0 though a rank has failed."""

    @instead_of(module, "launch_agent")
    def launch_agent(true: Any, *inputs: Any, **keywords: Any) -> Any:
        try:
            return true(*inputs, **keywords)
        except module.ChildFailedError:
            return {}


@lie("13", "restart", module="torch.distributed.launcher.api")
def torchrun_restarts_once_by_default(module: Any) -> None:
    """Without `--max-restarts`, torchrun starts the ranks once more."""

    @instead_of(module, "launch_agent")
    def launch_agent(true: Any, config: Any, *inputs: Any, **keywords: Any) -> Any:
        config.max_restarts = max(config.max_restarts, 1)
        return true(config, *inputs, **keywords)


@lie("13", "record|error file|which rank", module="torch.distributed.elastic.multiprocessing.errors")
def record_writes_no_error_file(module: Any) -> None:
    """`@record` writes no file about the exception."""
    module.record = lambda function, error_handler=None: function


@lie("12", "signal|requeue|batch|Slurm", file="helpers/export/templates/slurm.sbatch")
def batch_file_asks_for_no_warning(text: str) -> str:
    """The batch file does not ask Slurm for a signal before the time is up."""
    return swap(text, "#SBATCH --signal=USR1@", "# no --signal=")


@lie("12", "node|local rank|card", file="notebooks/12_multi_node.ipynb")
def the_preflight_tries_first_cards_only(text: str) -> str:
    """The check of a cluster makes no group between nodes but that of their first ranks."""
    return swap(text, "if len(peers) > 1:", "if not peers:")


@lie("nodes_in_practice", "kill|-9", module="torch.distributed.elastic.multiprocessing.errors")
def a_kill_looks_like_an_exit(errors: Any) -> None:
    """`torchrun` reports a killed rank as one that ended with status 1."""

    @instead_of(errors.ProcessFailure, "__post_init__")
    def __post_init__(true: Any, failure: Any) -> None:
        failure.exitcode = 1
        true(failure)


@lie("nodes_in_practice", "port|address", module="torch.distributed.elastic.rendezvous.static_tcp_rendezvous")
def a_taken_port_is_no_error(static: Any) -> None:
    """Static rendezvous takes a free port, whichever port it is given."""

    @instead_of(static.StaticTCPRendezvous, "__init__")
    def __init__(true: Any, self: Any, address: str, port: int, *inputs: Any, **keywords: Any) -> None:
        true(self, address, 0, *inputs, **keywords)


@lie("nodes_in_practice", "timeout|wait", module=C10D)
def groups_have_the_default_timeout(c10d: Any) -> None:
    """`new_group` ignores the timeout that it is given."""

    @instead_of(c10d, "new_group")
    def new_group(true: Any, *inputs: Any, timeout: Any = None, **keywords: Any) -> Any:
        return true(*inputs, **keywords)


@lie("nodes_in_practice", "send|group|order", module=C10D)
def a_broadcast_waits_for_nobody(c10d: Any) -> None:
    """`broadcast` returns at once on the rank that sends."""
    kept = []

    @instead_of(c10d, "broadcast")
    def broadcast(true: Any, tensor: Any, src: Any = None, *inputs: Any, **keywords: Any) -> Any:
        if src != c10d.get_rank():
            return true(tensor, src, *inputs, **keywords)
        kept.append(true(tensor, src, *inputs, **keywords | {"async_op": True}))


@lie("nodes_in_practice", "peer|died|shrink|group", module=C10D)
def shrink_group_is_accepted(c10d: Any) -> None:
    """`shrink_group` gives a group on gloo, too."""
    c10d.shrink_group = lambda ranks, group=None, *inputs: group


@lie("nodes_in_practice", "timeout|abort", module=C10D)
def abort_ends_the_call(c10d: Any) -> None:
    """On gloo, aborting a group ends the collectives that wait in it."""

    @instead_of(c10d, "all_reduce")
    def all_reduce(true: Any, tensor: Any, *inputs: Any, group: Any = None, **keywords: Any) -> Any:
        if group is None:
            return true(tensor, *inputs, **keywords)
        raise RuntimeError("The group was aborted.")


@lie("nodes_in_practice", "card|build|code", file="helpers/doctor/facts.py")
def machine_code_runs_on_newer_cards(text: str) -> str:
    """Machine code for a GPU runs on every newer one."""
    return swap(text, "built_for[0] == capability[0] and built_for <= capability", "built_for <= capability")


@lie("13", "emergency|save", file="helpers/runtime/checkpoint.py")
def an_emergency_save_has_its_name_at_once(text: str) -> str:
    """An emergency save is written under its final name, not renamed when it is complete."""
    part = 'part = path.with_name(f".{path.name}.part")'
    return swap(text, part, f'{part} if "emergency" not in path.name else path')


@lie("groups_and_meshes", "socket", file="notebooks/groups_and_meshes.ipynb")
def groups_of_all_are_one(text: str) -> str:
    """A new group of all ranks is the one that they are in already."""
    return swap(text, "dist.new_group()", "dist.group.WORLD")


# --- Profiling and debugging


@lie("14", "all.?reduce|collective|communication", module="torch.profiler.profiler")
def profiler_loses_collectives(module: Any) -> None:
    """The profiler's trace has no collectives."""

    @instead_of(module._KinetoProfile, "export_chrome_trace")
    def export_chrome_trace(true: Any, self: Any, path: Any, *inputs: Any, **keywords: Any) -> Any:
        import json
        from pathlib import Path

        true(self, path, *inputs, **keywords)
        trace = json.loads(Path(path).read_text())
        events = [event for event in trace["traceEvents"] if not event.get("name", "").startswith("gloo:")]
        Path(path).write_text(json.dumps(trace | {"traceEvents": events}))


@lie("14", "flight recorder|record", module=C10D)
def flight_recorder_loses_the_last_call(c10d: Any) -> None:
    """The flight recorder's dump lacks the collective that hangs."""
    import pickle

    from torch._C import _distributed_c10d

    library: Any = _distributed_c10d

    @instead_of(library, "_dump_fr_trace")
    def dump(true: Any, *inputs: Any) -> Any:
        log = pickle.loads(true(*inputs))
        return pickle.dumps(log | {"entries": log["entries"][:-1]})


@lie("14", "culprit|flight recorder|torchfrtrace|reader", module="torch.distributed.flight_recorder.components.types")
def flight_recorder_blames_the_wrong_rank(module: Any) -> None:
    """The flight recorder's reader names the other rank."""

    @instead_of(module.EntryState, "log")
    def log(true: Any, self: Any, *inputs: Any, errors: Any = None, **keywords: Any) -> Any:
        true(self, *inputs, errors=errors and {(1 - rank, what) for rank, what in errors}, **keywords)


@lie("14", "anomaly", module="torch.autograd.anomaly_mode")
def detect_anomaly_sees_nothing(module: Any) -> None:
    """`detect_anomaly` lets a gradient pass that is not a number."""
    true = module.detect_anomaly.__init__
    module.detect_anomaly.__init__ = lambda self, check_nan=True: true(self, check_nan=False)


@lie("14", "checksum|replicas|drift", module=C10D)
def replicas_compare_with_themselves(c10d: Any) -> None:
    """`all_gather` gives a rank its own tensor for everybody's."""

    def all_gather(tensors: Any, tensor: Any, *inputs: Any, **keywords: Any) -> Any:
        for part in tensors:
            part.copy_(tensor)

    c10d.all_gather = all_gather


@lie("14", "merge|lane|rank", file="notebooks/14_profiling_debugging.ipynb")
def lanes_of_a_merged_trace_lose_their_names(text: str) -> str:
    """In the merged trace a rank's CPU and its GPU have the same name."""
    return swap(text, "{lanes.get(pid, '')}", "")


# --- What NCCL and the watchdog say

READING = "notebooks/reading_nccl.ipynb"


@lie("reading_nccl", "transport|way|via", file=READING)
def a_transport_is_read_without_its_gpu_direct(text: str) -> str:
    """The reader of NCCL's log stops at the adapter, so that `GDRDMA` and its absence look alike."""
    return swap(text, r"via (\\S+)", r"via (\\w+/\\w+)")


@lie("reading_nccl", "GDRDMA|adapter|advice", file=READING)
def gpu_direct_is_blamed_too(text: str) -> str:
    """The advice on NCCL's log blames connections with `GDRDMA` as well."""
    return swap(text, r"(?!\\S*GDRDMA)", "", times=2)


@lie("reading_nccl", "smallest|not called|last enqueued", file=READING)
def who_called_most_is_behind(text: str) -> str:
    """Of the watchdog's messages, the ranks that have called more are named as those that lag behind."""
    return swap(text, "if number < first}", "if number > first}")


@lie("reading_nccl", "count|RAS", file=READING)
def ras_names_who_is_ahead(text: str) -> str:
    """In NCCL's RAS report, the ranks that have launched the most collectives are named as late."""
    return swap(text, "if count[kind] < most}", "if count[kind] == most}")


@lie("reading_nccl", "stack|stands|server", module="torch.distributed.debug._frontend")
def the_debug_server_shows_rank_0_for_all(module: Any) -> None:
    """PyTorch's debug server shows rank 0's answer for every rank's."""

    @instead_of(module, "fetch_all")
    def fetch_all(true: Any, *inputs: Any, **keywords: Any) -> Any:
        addresses, answers = true(*inputs, **keywords)
        return addresses, answers[:1] * len(answers)


# --- Pipelines


@lie("08", "order|1F1B|schedule", module="torch.distributed.pipelining.schedules")
def one_forward_one_backward_is_gpipe(module: Any) -> None:
    """`Schedule1F1B` runs all forwards, and then all backwards."""
    module.Schedule1F1B._step_microbatches = module.ScheduleGPipe._step_microbatches


@lie("08", "gradient|micro-batch", module="torch.distributed.pipelining.schedules")
def a_micro_batch_is_dropped(module: Any) -> None:
    """A schedule computes the first micro-batch twice, and never the last."""

    @instead_of(module._PipelineSchedule, "_split_inputs")
    def split_inputs(true: Any, self: Any, *inputs: Any, **keywords: Any) -> Any:
        parts, names = true(self, *inputs, **keywords)
        return [*parts[:-1], parts[0]], [*names[:-1], names[0]]


@lie("08 decision_guide", "divid|micro-batch|gradient", module="torch.distributed.pipelining.stage")
def gradients_are_not_divided_by_micro_batches(module: Any) -> None:
    """A schedule adds the micro-batches' gradients up, and does not divide by their number."""
    module._PipelineStageBase.scale_grads = nothing


@lie("08", "bubble|idle", file="notebooks/08_pipeline_parallel.ipynb")
def bubble_is_off_by_one(text: str) -> str:
    """The model of a schedule counts a rank's work as idle time."""
    return swap(text, "/ work - 1", "/ work")


@lie("08", "schedule|gradient", module="torch.distributed.pipelining.schedules")
def a_v_of_stages_counts_losses_twice(module: Any) -> None:
    """`ScheduleZBVZeroBubble` takes each micro-batch's loss twice."""

    @instead_of(module.ScheduleZBVZeroBubble, "__init__")
    def __init__(true: Any, self: Any, *inputs: Any, loss_fn: Any, **keywords: Any) -> None:
        true(self, *inputs, loss_fn=lambda *values: 2 * loss_fn(*values), **keywords)


@lie("08", "eval|norm", module="torch.distributed.pipelining.schedules")
def an_evaluation_leaves_gradients_alone(module: Any) -> None:
    """A schedule's `eval` does not touch the gradients."""

    @instead_of(module._PipelineSchedule, "eval")
    def evaluate(true: Any, self: Any, *inputs: Any, **keywords: Any) -> Any:
        scale, self.scale_grads = self.scale_grads, False
        true(self, *inputs, **keywords)
        self.scale_grads = scale


@lie("08", "fewer|micro-batches", module="torch.distributed.pipelining.schedules")
def gpipe_needs_as_many_micro_batches_as_stages(module: Any) -> None:
    """`ScheduleGPipe` refuses fewer micro-batches than stages, as `Schedule1F1B` does."""

    @instead_of(module.ScheduleGPipe, "__init__")
    def __init__(true: Any, self: Any, stage: Any, n_microbatches: int, *inputs: Any, **keywords: Any) -> None:
        if n_microbatches < stage.num_stages:
            raise ValueError("Number of microbatches must be greater than or equal to the number of stages")
        true(self, stage, n_microbatches, *inputs, **keywords)


@lie("08", "schedule|order", module="torch.distributed.pipelining.schedules")
def looped_bfs_alternates_its_stages(module: Any) -> None:
    """`ScheduleLoopedBFS` runs its stages' forwards in turn, and not all of one stage first."""

    @instead_of(module.ScheduleLoopedBFS, "_calculate_single_rank_operations")
    def calculate(true: Any, self: Any, rank: int) -> Any:
        work = true(self, rank)
        first = next(at for at, action in enumerate(work) if action)
        count = 2 * self._n_microbatches
        forwards = sorted(work[first : first + count], key=lambda action: action.microbatch_index)
        return [*work[:first], *forwards, *work[first + count :]]


@lie("08", "hold|activations|memory", file="notebooks/08_pipeline_parallel.ipynb")
def the_meter_keeps_a_tensors_history(text: str) -> str:
    """The meter of activations keeps each tensor with its history, and so keeps some for ever."""
    return swap(text, "tensor.detach(), meter", "tensor, meter")


# --- Tensor parallel


@lie("07", "rank 0", module="torch.distributed.tensor._api")
def every_rank_divides_its_own_weights(module: Any) -> None:
    """`distribute_tensor` takes each rank's own numbers, and does not send the first rank's."""
    true = module.distribute_tensor
    module.distribute_tensor = lambda *inputs, **keywords: true(*inputs, **{**keywords, "src_data_rank": None})


@lie("07", "add|sum", module="torch.distributed.tensor.placement_types")
def summands_are_not_added(module: Any) -> None:
    """A DTensor's `Partial()` becomes `Replicate()` without a sum over the ranks."""
    module.Partial._reduce_value = lambda self, tensor, mesh, dim: tensor


@lie("07", "all-reduce|count", module="torch.distributed.tensor.debug._comm_mode")
def a_collective_is_not_counted(module: Any) -> None:
    """`CommDebugMode` leaves all-reduces out."""

    @instead_of(module.CommDebugMode, "get_comm_counts")
    def get_comm_counts(true: Any, self: Any) -> Any:
        return {kind: times for kind, times in true(self).items() if "all_reduce" not in str(kind)}


@lie("07", "norm|clip", module="torch.nn.utils.clip_grad")
def a_rank_clips_by_its_own_norm(module: Any) -> None:
    """The norm of the gradients is that of the parts that the rank holds."""

    @instead_of(module, "_get_total_norm")
    def get_total_norm(true: Any, tensors: Any, *inputs: Any, **keywords: Any) -> Any:
        return true([getattr(tensor, "_local_tensor", tensor) for tensor in tensors], *inputs, **keywords)


@lie("07", "seed|differ|one process", file="notebooks/07_tensor_parallel.ipynb")
def the_check_finds_no_difference(text: str) -> str:
    """`equal_to_one_process` finds no difference, whatever it compares."""
    return swap(text, "off.append((whole - here).abs().max())", "off.append((whole - whole).abs().max())")


@lie("07", "norm|SequenceParallel", module="torch.distributed.tensor.parallel.style")
def sequence_parallel_does_nothing(module: Any) -> None:
    """`SequenceParallel` leaves its layer as it was."""
    module.SequenceParallel._apply = lambda self, layer, mesh: layer


@lie("07", "fused|AdamW|norm", module="torch.optim.adamw")
def adamw_is_never_fused(module: Any) -> None:
    """`AdamW(fused=True)` loops over its parameters."""
    build_with(module.AdamW, fused=False)


@lie("07", "loss", module="torch.distributed.tensor.parallel.loss")
def the_divided_loss_takes_each_ranks_own_maximum(module: Any) -> None:
    """`loss_parallel` subtracts each rank's own largest logit, not the largest of all ranks."""
    true = module.funcol.all_reduce

    class WithoutMaximum:
        def all_reduce(tensor: Any, reduceOp: Any, group: Any) -> Any:
            return tensor if reduceOp == "MAX" else true(tensor, reduceOp, group)

    module.funcol = WithoutMaximum


@lie("07", "operator|strategy|local_map", module="torch.distributed.tensor.experimental._func_map")
def local_map_redistributes_nothing(module: Any) -> None:
    """`local_map` takes each rank's part as it is, whatever its placement, and redistributes nothing."""

    @instead_of(module, "local_map")
    def local_map(true: Any, *inputs: Any, in_placements: Any = None, **keywords: Any) -> Any:
        return true(*inputs, **keywords)


@lie("07", "dropout|seed", file="notebooks/07_tensor_parallel.ipynb")
def each_ranks_own_numbers_are_the_same(text: str) -> str:
    """The random numbers for the dropout of parts begin with the same seed on every rank."""
    return swap(text, "torch.manual_seed(seed + dist.get_rank())", "torch.manual_seed(seed)")


@lie("07", "type|collective", module="spmd_types.checker")
def the_checker_of_types_checks_nothing(module: Any) -> None:
    """`spmd_types` takes every operation for right."""
    module.typecheck = contextlib.nullcontext


@lie("09", "ring|keys", module=C10D)
def messages_travel_the_other_way(c10d: Any) -> None:
    """`batch_isend_irecv` sends to the rank before, and receives from the rank after."""

    @instead_of(c10d, "batch_isend_irecv")
    def batch_isend_irecv(true: Any, operations: Any) -> Any:
        receives = [operation.op is c10d.irecv for operation in operations]
        peers = [
            next(other.peer for other, receive in zip(operations, receives, strict=True) if receive != mine)
            for mine in receives
        ]
        for operation, peer in zip(operations, peers, strict=True):
            operation.peer = peer
            operation.group_peer = c10d.get_group_rank(operation.group, peer)
        return true(operations)


@lie("09", "Ulysses|all-to-all|expert", module="torch.distributed._functional_collectives")
def all_to_all_sends_no_gradient_back(module: Any) -> None:
    """`all_to_all_single_autograd` gives what it received a gradient, and what it sent none."""

    @instead_of(module, "all_to_all_single_autograd")
    def all_to_all_single_autograd(true: Any, tensor: Any, *inputs: Any, **keywords: Any) -> Any:
        return true(tensor.detach(), *inputs, **keywords) + 0 * tensor.sum()


@lie("09", "balance|count", file="notebooks/09_long_sequences_experts.ipynb")
def each_rank_balances_its_own_experts(text: str) -> str:
    """The balance loss counts only this rank's tokens."""
    return swap(text, "    dist.all_reduce(everywhere, group=group)", "    dist.get_world_size()")


@lie("09", "zigzag|scores|order", file="notebooks/09_long_sequences_experts.ipynb")
def zigzag_is_not_mirrored(text: str) -> str:
    """In zigzag order each rank gets two early chunks in a row."""
    return swap(text, "chunks[rank] + chunks[-1 - rank]", "chunks[2 * rank] + chunks[2 * rank + 1]")


@lie("09", "float32|bfloat16", file="notebooks/09_long_sequences_experts.ipynb")
def the_ring_adds_up_in_the_dtype_of_its_queries(text: str) -> str:
    """The ring keeps its sums in the dtype of the queries, and not in float32."""
    return swap(text, "torch.zeros_like(query, dtype=torch.float32)", "torch.zeros_like(query)")


@lie("09", "grouped|heads", file="notebooks/09_long_sequences_experts.ipynb")
def ulysses_copies_keys_before_it_sends_them(text: str) -> str:
    """With grouped queries Ulysses sends a copy of the keys and values for each head of queries."""
    copies = "(each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))"
    return swap(text, "for x in (query, key, value))", f"for x in (query, *{copies}))")


@lie("09", "token|expert", file="notebooks/09_long_sequences_experts.ipynb")
def a_rank_without_tokens_computes_nothing(text: str) -> str:
    """A rank that gets no token leaves its experts out, and they get no gradient."""
    return swap(text, "done = torch.cat(done)[", "done = (torch.cat(done) if sum(come) else arrived)[")


@lie("09", "heads", file="notebooks/09_long_sequences_experts.ipynb")
def ulysses_does_not_check_the_heads_of_keys(text: str) -> str:
    """Ulysses looks whether the ranks divide the heads of queries, but not those of keys."""
    return swap(text, r"(\"keys\", key.shape[1])", r"(\"keys\", query.shape[1])")


@lie("09", "DDP|expert", module=DDP)
def ddp_averages_what_it_should_ignore(module: Any) -> None:
    """DDP averages parameters that it was told to ignore."""
    module.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model = staticmethod(nothing)


# --- Long sequences in practice

LONG = "notebooks/long_sequences_in_practice.ipynb"
BALANCERS = "torch.distributed.tensor.experimental._context_parallel._load_balancer"


@lie("long_sequences_in_practice", "order|zigzag", module=BALANCERS)
def a_head_tail_balancer_divides_in_order(module: Any) -> None:
    """`_HeadTailLoadBalancer` gives each rank one chunk of the sequence, and not an early and a late one."""

    @instead_of(module._HeadTailLoadBalancer, "_generate_indices")
    def generate_indices(true: Any, *inputs: Any, **keywords: Any) -> Any:
        return true(*inputs, **keywords).sort().values


@lie("long_sequences_in_practice", "balance|block", module=BALANCERS)
def ptrr_deals_rows_out_in_order(module: Any) -> None:
    """`_PTRRLoadBalancer` does not look at the mask, and gives each rank its rows in order."""

    def in_order(process_time: Any, group_size: int) -> Any:
        return process_time.argsort().sort().values.view(group_size, -1)

    module._PTRRLoadBalancer.ptrr_scheduling = staticmethod(in_order)


@lie("long_sequences_in_practice", "document|mask", file=LONG)
def a_document_sees_earlier_ones(text: str) -> str:
    """The document mask lets a position look at earlier documents."""
    return swap(text, "(document[query] == document[key])", "(document[query] >= document[key])")


@lie("long_sequences_in_practice", "gather", file=LONG)
def gathering_counts_only_the_forward(text: str) -> str:
    """The counter of bytes leaves the backward out."""
    return swap(text, r"_opname.startswith(\"flex_cp_allgather\")", r"_opname == \"flex_cp_allgather\"")


# --- Planning


@lie("15", "rows|planned", module=FSDP)
def fully_shard_cuts_columns(module: Any) -> None:
    """`fully_shard` divides matrices by their columns."""

    def placed(parameter: Any) -> Any:
        from torch.distributed.tensor import Shard

        return Shard(parameter.ndim - 1)

    shard_with(module, lambda options: {"shard_placement_fn": placed})


@lie("15", "rows|divi|rank", file="helpers/planner/memory.py")
def the_planner_divides(text: str) -> str:
    """The planner divides a tensor's rows by the number of ranks, and does not round up."""
    return swap(text, 'math.ceil(rows / sharers) if shards == "rows" else rows / sharers', "rows / sharers")


@lie("15", "file|speed|planner", file="notebooks/15_planning.ipynb")
def the_cluster_file_gives_seconds_for_a_speed(text: str) -> str:
    """The file about the cluster gives a message's seconds as the memory's speed."""
    return swap(text, "{memory_speed:.4g}", "{links['in_node'][1]:.4g}")


@lie("15", "link|file|bandwidth", file="notebooks/15_planning.ipynb")
def a_link_is_as_fast_as_an_all_reduce(text: str) -> str:
    """The speed of a measured link is the bytes of an all-reduce in a second."""
    return swap(text, "sent = 2 * (ranks - 1) / ranks * message", "sent = message")


@lie("15", "moments|bfloat16", file="helpers/planner/conventions.py")
def bfloat16_moments_take_four_bytes(text: str) -> str:
    """The planner counts AdamW's bfloat16 moments as float32."""
    return swap(text, '"bfloat16-moments": (4, 4, 4)', '"bfloat16-moments": (4, 4, 8)')


@lie("15", "fit|memory|free", file="helpers/planner/search.py")
def the_search_fills_twice_the_memory(text: str) -> str:
    """The search lets a layout take twice the memory of a GPU."""
    return swap(text, "if size > self.cluster.memory:", "if size > 2 * self.cluster.memory:")


@lie("15", "stage|micro-batch", file="helpers/planner/memory.py")
def the_planner_divides_activations_by_stages(text: str) -> str:
    """The planner gives each pipeline stage one micro-batch at a time."""
    return swap(text, "        return min(p - stage, m)", "        return 1")


@lie("15", "collective|message|count", file="helpers/planner/communication.py")
def the_planner_forgets_the_backwards_gathers(text: str) -> str:
    """The planner's FSDP gathers parameters in the forward only."""
    return swap(text, "if unit.what != OUTSIDE and", 'if unit.what == "nothing" and')


@lie("15", "fit|step|left out", file="helpers/planner/step_time.py")
def the_planner_never_waits_for_a_stage(text: str) -> str:
    """The planner's pipelines have no bubble."""
    return swap(text, "(layout.pp - 1) *", "0 *")


@lie("15", "float8|linear", file="helpers/planner/layout.py")
def attention_multiplies_in_float8(text: str) -> str:
    """The planner's attention and head multiply in float8, as its linear layers do."""
    return swap(text, 'return "bfloat16" if self.dtype == "float8" else self.dtype', "return self.dtype")


@lie("15", "power|GPU", file="helpers/planner/cluster.py")
def a_limit_of_power_costs_nothing(text: str) -> str:
    """The planner's GPUs reach their peak under any limit of power."""
    return swap(text, "* min(share, 1) ** (1 / 3)", "* min(share, 1) ** 0")


@lie("15", "GiB|keeps", file="helpers/planner/memory.py")
def what_is_gathered_once_takes_no_memory(text: str) -> str:
    """The planner's FSDP gathers once a step, and forgets that parameters and gradients stay."""
    return swap(text, "whole = (size + summed * several) * computed", "whole = 0")


@lie("15", "GiB|every second", file="helpers/planner/memory.py")
def sac_keeps_every_product(text: str) -> str:
    """The planner's checkpointing of operations keeps every matrix product."""
    return swap(text, "for tensor in products[::2])", "for tensor in products)")


@lie("15", "fail|kept|left", file="helpers/planner/failures.py")
def a_restart_takes_no_time(text: str) -> str:
    """The planner's jobs restart at once."""
    return swap(text, "rate * (restart + interval / 2)", "rate * interval / 2")


@lie("15", "row|contradict|mistake", file="helpers/planner/experiments/published.py")
def a_row_is_never_refused(text: str) -> str:
    """The planner takes published rows that contradict themselves."""
    return swap(text, 'if wrong := contradictions(tomllib.loads(text, parse_float=Decimal)["row"]):', "if wrong := []:")


@lie("16", "image|replica", file="notebooks/16_capstone.ipynb")
def replicas_see_the_same_images(text: str) -> str:
    """On a mesh, all replicas train on the first part of the batch."""
    return swap(text, '[mesh.get_local_rank(\\"dp\\")]', "[0]")


@lie("16", "norm|clip|equal|plain", file="notebooks/16_capstone.ipynb")
def what_all_slices_hold_counts_for_each(text: str) -> str:
    """The norm over a mesh counts a gradient once for each slice that holds it."""
    return swap(text, "1 if sliced else slices", "1")


@lie("16", "bfloat16|precision", file="notebooks/16_capstone.ipynb")
def the_mesh_computes_in_float32(text: str) -> str:
    """The capstone computes in float32, whatever its flag says."""
    return swap(text, "getattr(torch, args.dtype)", "torch.float32")


@lie("16", "patience|timeout|wait", file="notebooks/16_capstone.ipynb")
def only_the_default_group_has_patience(text: str) -> str:
    """`--patience` does not reach the groups of the mesh."""
    return swap(text, "for group in mesh.get_all_groups():", "for group in ():")


@lie("16", "collective|norm", file="notebooks/16_capstone.ipynb")
def the_norm_is_summed_twice(text: str) -> str:
    """The norm over a mesh takes two all-reduces."""
    return swap(text, "dist.all_reduce(square)", "[dist.all_reduce(x) for x in (square.clone(), square)]")


@lie("16", "draw|digit|classifier", file="notebooks/16_capstone.ipynb")
def another_digit_is_drawn(text: str) -> str:
    """The model draws another digit than the one that was asked for."""
    return swap(text, "stage(grey[:, : pixel + 1], labels)", "stage(grey[:, : pixel + 1], labels.roll(1))")
