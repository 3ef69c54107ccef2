"""The lies: each is a small patch of torch or of a helper, with the chapters whose cells have to notice it.

A lie about torch gets a module that has just been imported, and changes it. A lie about a helper or a chapter gets the
text of a file and returns a changed text. Every process of a sabotaged run imports this file, so it imports little.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIES: dict[str, "Lie"] = {}  # {name: Lie}, in the order of the chapters


@dataclass(frozen=True)
class Lie:
    name: str
    says: str  # the lie in plain words
    chapters: list[str]  # chapters whose cells have to notice, such as "04"
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


C10D = "torch.distributed.distributed_c10d"
AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent"
DDP = "torch.nn.parallel.distributed"
SAMPLER = "torch.utils.data.distributed"
SCALER = "torch.amp.grad_scaler"
FSDP = "torch.distributed.fsdp._fully_shard._fully_shard"
LAUNCH = "helpers/ranks/launch.py"
CHECKPOINT = "helpers/runtime/checkpoint.py"


# --- Groups, launchers, meshes


def give_ranks(agent: Any, change: Any) -> None:
    """Make torchrun's agent give each rank the environment that ``change`` returns for the right one."""

    @instead_of(agent, "start_processes")
    def start_processes(true: Any, *inputs: Any, envs: Any, **keywords: Any) -> Any:
        return true(*inputs, envs={rank: env | change(env) for rank, env in envs.items()}, **keywords)


@lie("01", "each of them its number|world of four|rank", file=LAUNCH)
def launch_returns_results_backwards(text: str) -> str:
    """`launch` returns the ranks' results in the wrong order."""
    return swap(text, "read_bytes()) for rank in range(nproc)]", "read_bytes()) for rank in reversed(range(nproc))]")


@lie("01 02 04", "hang|stands still|timeout|wait|never come", file=LAUNCH)
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


@lie("12", "node", module=AGENT)
def every_node_is_node_0(agent: Any) -> None:
    """`torchrun` sets `GROUP_RANK` to 0 on every node."""
    give_ranks(agent, lambda env: {"GROUP_RANK": "0"})


@lie("01", "backend|sick|gloo", file="helpers/runtime/process_group.py")
def backends_are_not_compared(text: str) -> str:
    """`start_process_group` starts though one node takes gloo and the other NCCL."""
    return swap(text, "    compare(store, rank, world_size, few or backend)\n", "")


@lie("01", "group", module=C10D)
def new_group_takes_everybody(c10d: Any) -> None:
    """`new_group` makes a group of all ranks, whichever ranks it is given."""
    true = c10d.new_group
    c10d.new_group = lambda ranks=None, *inputs, **keywords: true(None, *inputs, **keywords)


@lie("01", "barrier", module=C10D)
def barrier_does_not_wait(c10d: Any) -> None:
    """`barrier` returns at once, and waits for nobody."""
    calls = []

    @instead_of(c10d, "barrier")
    def barrier(true: Any, *inputs: Any, **keywords: Any) -> Any:
        calls.append(inputs)
        return true(*inputs, **keywords) if len(calls) == 1 else None  # the first call is launch's own


@lie("01", "monitored.?barrier|roll call", module=C10D)
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


@lie("01", "mesh|axis|axes", module="torch.distributed.device_mesh")
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


# --- Samplers and loaders


@lie("03", "set_epoch", module=SAMPLER)
def set_epoch_is_ignored(module: Any) -> None:
    """`set_epoch` is ignored: every epoch has one order."""
    module.DistributedSampler.set_epoch = lambda self, epoch: None


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


# --- DDP


@lie("04", "broadcast|equal at the start|copies rank 0|before DDP", module=DDP)
def ddp_without_its_first_broadcast(module: Any) -> None:
    """DDP does not broadcast rank 0's weights when it is built."""
    module._sync_module_states = lambda **_: None


@lie("04", "no_sync", module=DDP)
def no_sync_that_syncs(module: Any) -> None:
    """`no_sync` sends the gradients all the same."""
    import contextlib

    module.DistributedDataParallel.no_sync = lambda self: contextlib.nullcontext()


@lie("04", "average|mean", module=DDP)
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
    module.DistributedDataParallel._sync_buffers = lambda self: None


@lie("04", "bucket", module=DDP)
def ddp_takes_one_bucket(module: Any) -> None:
    """DDP puts all gradients into one bucket, whatever `bucket_cap_mb` says."""
    build_with(module.DistributedDataParallel, bucket_cap_mb=1000)


@lie("04", "Join|uneven", module="torch.distributed.algorithms.join")
def join_does_not_shadow(module: Any) -> None:
    """`Join` does not shadow the collectives of the ranks that still train."""
    module.Join._get_num_nonjoined_procs = lambda self: 0


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


@lie("05 06", "clip|norm", module="torch.nn.utils.clip_grad")
def clip_grad_norm_does_not_clip(module: Any) -> None:
    """`clip_grad_norm_` returns the norm, and leaves the gradients as long as they were."""
    module._clip_grads_with_norm_ = lambda *inputs, **keywords: None


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
    module.FSDPModule.set_requires_gradient_sync = lambda self, *inputs, **keywords: None


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


# --- Checkpoints


@lie("10", "HSDP|write|slice", module="torch.distributed.checkpoint.default_planner")
def the_lowest_rank_writes_every_copy(module: Any) -> None:
    """Of the ranks that hold a slice, the lowest one writes it, however much that rank has to write already."""
    true = module.dedup_save_plans
    module.dedup_save_plans = lambda plans, _: true(plans, True)


@lie("10", "load|resume|same bits", module="torch.distributed.checkpoint.state_dict_loader")
def dcp_load_loads_nothing(module: Any) -> None:
    """`dcp.load` returns, and the tensors hold what they held."""
    module.load = lambda *inputs, **keywords: None


@lie("10 11", "optimizer|momentum|same bits|every bit", module="torch.optim.optimizer")
def optimizer_is_not_restored(module: Any) -> None:
    """A checkpoint without the optimizer: a resume begins with fresh momenta."""
    module.Optimizer.load_state_dict = lambda *inputs, **keywords: None


@lie("10", "scaler", module=SCALER)
def scaler_is_not_restored(module: Any) -> None:
    """A checkpoint without the gradient scaler: a resume begins with a scale of 65,536."""
    module.GradScaler.load_state_dict = lambda *inputs, **keywords: None


@lie("10", "random|same bits", module="torch.random")
def generator_is_not_restored(module: Any) -> None:
    """A checkpoint without the random numbers: `set_rng_state` does nothing."""
    module.set_rng_state = lambda *inputs, **keywords: None


@lie("10", "schedule|learning rate", module="torch.optim.lr_scheduler")
def schedule_starts_again(module: Any) -> None:
    """A checkpoint without the schedule: after a resume the learning rate starts again."""
    module.LRScheduler.load_state_dict = lambda *inputs, **keywords: None


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


@lie("13", "record|error file|which rank", module="torch.distributed.elastic.multiprocessing.errors")
def record_writes_no_error_file(module: Any) -> None:
    """`@record` writes no file about the exception."""
    module.record = lambda function, error_handler=None: function


@lie("12", "signal|requeue|batch|Slurm", file="helpers/export/templates/slurm.sbatch")
def batch_file_asks_for_no_warning(text: str) -> str:
    """The batch file does not ask Slurm for a signal before the time is up."""
    return swap(text, "#SBATCH --signal=USR1@", "# no --signal=")


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


@lie("08", "divid|micro-batch|gradient", module="torch.distributed.pipelining.stage")
def gradients_are_not_divided_by_micro_batches(module: Any) -> None:
    """A schedule adds the micro-batches' gradients up, and does not divide by their number."""
    module._PipelineStageBase.scale_grads = lambda self, factor: None


@lie("08", "bubble|idle", file="notebooks/08_pipeline_parallel.ipynb")
def bubble_is_off_by_one(text: str) -> str:
    """The model of a schedule counts a rank's work as idle time."""
    return swap(text, "/ work - 1", "/ work")


@lie("08", "scale", module="torch.distributed.fsdp.sharded_grad_scaler")
def each_rank_has_its_own_scale(module: Any) -> None:
    """`ShardedGradScaler` does not ask the other ranks whether a gradient was infinite."""
    module.ShardedGradScaler = module.GradScaler


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


@lie("07", "loss", module="torch.distributed.tensor.parallel.loss")
def the_divided_loss_takes_each_ranks_own_maximum(module: Any) -> None:
    """`loss_parallel` subtracts each rank's own largest logit, not the largest of all ranks."""
    true = module.funcol.all_reduce

    class WithoutMaximum:
        def all_reduce(tensor: Any, reduceOp: Any, group: Any) -> Any:
            return tensor if reduceOp == "MAX" else true(tensor, reduceOp, group)

    module.funcol = WithoutMaximum


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


@lie("09", "order|zigzag|library", module="torch.distributed.tensor.experimental._context_parallel._attention")
def context_parallel_divides_in_order(module: Any) -> None:
    """`context_parallel` gives each rank one chunk of the sequence, and not an early and a late one."""
    module._create_default_load_balancer = lambda *inputs, **keywords: None


@lie("09", "balance|count", file="notebooks/09_long_sequences_experts.ipynb")
def each_rank_balances_its_own_experts(text: str) -> str:
    """The balance loss counts only this rank's tokens."""
    return swap(text, "    dist.all_reduce(everywhere, group=group)", "    dist.get_world_size()")


@lie("09", "zigzag|scores|order", file="notebooks/09_long_sequences_experts.ipynb")
def zigzag_is_not_mirrored(text: str) -> str:
    """In zigzag order each rank gets two early chunks in a row."""
    return swap(text, "chunks[rank] + chunks[-1 - rank]", "chunks[2 * rank] + chunks[2 * rank + 1]")


@lie("09", "DDP|expert", module=DDP)
def ddp_averages_what_it_should_ignore(module: Any) -> None:
    """DDP averages parameters that it was told to ignore."""
    module.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model = staticmethod(lambda *inputs: None)


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


@lie("15", "stage|micro-batch", file="helpers/planner/memory.py")
def the_planner_divides_activations_by_stages(text: str) -> str:
    """The planner gives each pipeline stage one micro-batch at a time."""
    return swap(text, "        return min(p - stage, m)", "        return 1")


@lie("15", "collective|message|count", file="helpers/planner/communication.py")
def the_planner_forgets_the_backwards_gathers(text: str) -> str:
    """The planner's FSDP gathers parameters in the forward only."""
    return swap(text, "if unit.what != OUTSIDE:", 'if unit.what == "nothing":')


@lie("15", "fit|step|left out", file="helpers/planner/step_time.py")
def the_planner_never_waits_for_a_stage(text: str) -> str:
    """The planner's pipelines have no bubble."""
    return swap(text, "(layout.pp - 1) *", "0 *")


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
