"""Lies (planted faults) about DDP and automatic mixed precision."""

import contextlib
import sys
from typing import Any

from sabotage.lies.telling_lies import (
    DDP,
    LAUNCH,
    SCALER,
    build_with,
    call_with,
    instead_of,
    lie,
    nothing,
    replace,
    swap,
)

# --- DDP


@lie("00 04", "broadcast|equal at the start|copies rank 0|before DDP|those of rank 0", module=DDP)
def ddp_without_its_first_broadcast(module: Any) -> None:
    """DDP does not broadcast rank 0's weights when it is built."""
    replace(module, "_sync_module_states", nothing)


@lie("04 04b", "no_sync", module=DDP)
def no_sync_that_syncs(module: Any) -> None:
    """`no_sync` sends the gradients all the same."""

    replace(module.DistributedDataParallel, "no_sync", lambda self: contextlib.nullcontext())


@lie("00 04", "average|mean", module=DDP)
def ddp_adds_up_gradients(module: Any) -> None:
    """DDP adds the ranks' gradients up, and does not divide by the number of ranks."""

    @instead_of(module.DistributedDataParallel, "forward")
    def forward(original: Any, self: Any, *inputs: Any, **keywords: Any) -> Any:
        output = original(self, *inputs, **keywords)
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * module.dist.get_world_size())
        return output


@lie("04b", "buffers|running", module=DDP)
def ddp_never_copies_buffers(module: Any) -> None:
    """DDP does not copy rank 0's buffers before a forward."""
    replace(module.DistributedDataParallel, "_sync_buffers", nothing)


@lie("04", "bucket", module=DDP)
def ddp_takes_one_bucket(module: Any) -> None:
    """DDP puts all gradients into one bucket, whatever `bucket_cap_mb` says."""
    build_with(module.DistributedDataParallel, bucket_cap_mb=1000)


@lie("04", "first bucket", module=DDP)
def ddp_first_bucket_is_as_large_as_the_others(module: Any) -> None:
    """DDP's first bucket closes at 25 MiB by default, like the others."""

    @instead_of(module.DistributedDataParallel, "__init__")
    def __init__(original: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        original(self, *inputs, **{"bucket_cap_mb": 25, **keywords})


@lie("04", "order", notebook=True)
def ranks_send_in_one_order(text: str) -> str:
    """In DDP by hand rank 1 sends its buckets in rank 0's order, where it should send them in its own."""
    return swap(text, "buckets.reverse()", "pass")


@lie("04b", "buffers", module=DDP)
def ddp_does_not_copy_buffers_when_built(module: Any) -> None:
    """DDP does not copy rank 0's buffers when it is built."""

    @instead_of(module, "_sync_module_states")
    def sync(original: Any, *inputs: Any, **keywords: Any) -> Any:
        return original(*inputs, **{**keywords, "broadcast_buffers": False})


@lie("04", "clip", module="torch.nn.utils.clip_grad")
def clip_grad_norm_clips_at_twice_the_norm(module: Any) -> None:
    """`clip_grad_norm_` clips at twice the norm that it is given."""

    @instead_of(module, "_clip_grads_with_norm_")
    def clip(original: Any, parameters: Any, max_norm: Any, *inputs: Any, **keywords: Any) -> Any:
        return original(parameters, 2 * max_norm, *inputs, **keywords)


@lie("04b", "Join|uneven", module=DDP)
def join_answers_with_ones(module: Any) -> None:
    """A rank that has run out answers with ones in `Join`, where it should answer with zeros."""

    # DDP's own method is the same, but for the ones. Its zeros add nothing to the gradients of the other ranks.
    def answer(self: Any) -> None:
        works = []
        for bucket in self.reducer._get_zeros_like_grad_buckets():
            bucket.buffer().fill_(1)
            works.append(self.reducer._run_comm_hook(bucket))
        for work in works:
            work.wait()

    replace(module.DistributedDataParallel, "_match_all_reduce_for_bwd_pass", answer)


@lie("04b", "Join|uneven", module=DDP)
def join_keeps_each_ranks_weights(module: Any) -> None:
    """A rank that has run out keeps its weights after `Join`, where it should get the last rank's."""
    replace(module.DistributedDataParallel, "_sync_final_model", nothing)


@lie("04b", "Join|exception", module="torch.distributed.algorithms.join")
def join_never_throws(module: Any) -> None:
    """`Join` goes on when a rank has run out, whatever `throw_on_early_termination` says."""
    build_with(module.Join, throw_on_early_termination=False)


@lie("04", "sampler|step count", notebook=True)
def ranks_without_a_sampler_see_other_images(text: str) -> str:
    """Without a sampler, each rank takes other images than the others."""
    return swap(
        text,
        "my_first_images, _ = next(iter(loader))",
        "my_first_images, _ = next(iter(make_loader(train_set, 192, 0, device)))",
    )


@lie("04", "micro-batch|tokens", notebook=True)
def the_sum_of_losses_is_divided_by_the_ranks_own_images(text: str) -> str:
    """With micro-batches on unequal ranks, the sum of losses is divided by the images of the rank, not of all ranks."""
    return swap(text, "dist.all_reduce(total)  # once, before", "total *= world_size  # once, before")


@lie("04", "class weights", module="torch.nn.functional")
def class_weights_do_not_count_in_the_mean(module: Any) -> None:
    """`cross_entropy` with class weights divides by the number of samples, not by the sum of their weights."""

    @instead_of(module, "cross_entropy")
    def cross_entropy(original: Any, scores: Any, labels: Any, weight: Any = None, **options: Any) -> Any:
        if weight is None:
            return original(scores, labels, **options)
        return original(scores, labels, weight, reduction="sum", **options) / len(labels)


@lie("04", "first backward", module=DDP)
def ddp_has_its_final_buckets_at_once(module: Any) -> None:
    """In its first backward DDP closes buckets at the sizes that it has from the second on."""

    @instead_of(module.dist, "_compute_bucket_assignment_by_size")
    def assignment(original: Any, parameters: Any, limits: list[int], *rest: Any) -> Any:
        if limits == [sys.maxsize]:
            limits = [2**20, 25 * 2**20]
        return original(parameters, limits, *rest)


@lie("04", "order|ring", module=DDP)
def sums_are_in_the_order_of_ranks(module: Any) -> None:
    """The loop by hand and DDP add up in the order of the ranks, wherever an element is in its message."""
    dist = module.dist

    def average(tensor: Any) -> None:
        parts = [module.torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        tensor.copy_(sum(part / len(parts) for part in parts))

    @instead_of(dist, "all_reduce", waits=True)
    def all_reduce(original: Any, tensor: Any, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        if op != dist.ReduceOp.AVG:
            return original(tensor, op, **options)
        average(tensor)
        return None

    def hook(state: Any, bucket: Any) -> Any:
        average(bucket.buffer())
        future: Any = module.torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__.clear()  # DDP refuses a hook whose annotations are others than it expects

    @instead_of(module.DistributedDataParallel, "forward")
    def forward(original: Any, self: Any, *inputs: Any, **keywords: Any) -> Any:
        if not self._comm_hooks:
            self.register_comm_hook(None, hook)
        return original(self, *inputs, **keywords)


@lie("04", "seed", notebook=True)
def the_loader_ignores_the_seed(text: str) -> str:
    """Chapter 4's loader does not pass the seed on, so that every seed gives the same order."""
    return swap(
        text, "DistributedSampler(dataset, seed=seed, drop_last=True)", "DistributedSampler(dataset, drop_last=True)"
    )


@lie("04b", "inplace|two forwards", module="torch.autograd")
def autograd_sees_the_copy_of_buffers(module: Any) -> None:
    """DDP does not hide its copy of the buffers from autograd, as before PyTorch 2.13."""
    replace(module, "_unsafe_preserve_version_counter", lambda tensors: contextlib.nullcontext())


@lie("04b", "search|unused", module=DDP)
def ddp_never_searches(module: Any) -> None:
    """DDP does not search for unused parameters, whatever `find_unused_parameters` says."""
    build_with(module.DistributedDataParallel, find_unused_parameters=False)


@lie("04b", "reentrant", module="torch.utils.checkpoint")
def checkpointing_is_always_reentrant(module: Any) -> None:
    """`checkpoint` ignores `use_reentrant=False`."""
    call_with(module, "checkpoint", use_reentrant=True)


@lie("04b", "float16|fp16|half", module="torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
def the_float16_hook_sends_float32(module: Any) -> None:
    """`fp16_compress_hook` sends float32, as DDP does without a hook."""
    replace(module, "fp16_compress_hook", module.allreduce_hook)


@lie("04b", "SyncBatchNorm", module="torch.nn.modules.batchnorm")
def batchnorms_are_not_converted(module: Any) -> None:
    """`convert_sync_batchnorm` returns the model as it is."""
    replace(module.SyncBatchNorm, "convert_sync_batchnorm", lambda model, process_group=None: model)


@lie("04b", "method", module=DDP)
def ddp_hands_on_methods(module: Any) -> None:
    """A method of the model can be called on the DDP object."""

    @instead_of(module.DistributedDataParallel, "__getattr__")
    def __getattr__(true: Any, self: Any, name: str) -> Any:
        if name == "loss":
            return self.module.loss
        return true(self, name)


@lie("04b", "view", module=DDP)
def gradients_are_never_views(module: Any) -> None:
    """DDP keeps the gradients apart from its buckets, whatever `gradient_as_bucket_view` says."""
    build_with(module.DistributedDataParallel, gradient_as_bucket_view=False)


@lie("04b", "EMA|AveragedModel", module="torch.optim.swa_utils")
def the_average_is_the_latest(module: Any) -> None:
    """The exponential average of the weights is the latest weights, whatever its decay."""

    @instead_of(module, "get_ema_multi_avg_fn")
    def get_ema_multi_avg_fn(true: Any, decay: float) -> Any:
        return true(0.0)


@lie("04b", "[Bb]roadcast|buffers", notebook=True)
def the_models_buffers_are_sent_for_the_averages(text: str) -> str:
    """Before a save, rank 0 sends the buffers of the model that trains, and not those of its average."""
    return swap(text, "for buffer in ema.module.buffers():", "for buffer in model.module.buffers():")


@lie("04b", "[Gg]ather|contrastive", notebook=True)
def gathered_features_have_their_own_gradient_only(text: str) -> str:
    """The gradient of gathered features is that of this rank's loss alone."""
    own = "mine.copy_(gradient.chunk(dist.get_world_size())[dist.get_rank()])"
    return swap(text, "dist.reduce_scatter_single(mine, gradient.contiguous())", own)


@lie("04b", "[Gg]ather|contrastive", module="torch.distributed._functional_collectives")
def the_library_gathers_without_a_gradient(module: Any) -> None:
    """`all_gather_single` gives a rank the gradient of its own loss alone."""

    @instead_of(module, "all_gather_single")
    def gather(original: Any, mine: Any, gather_dim: int, group: Any) -> Any:
        import torch

        parts = list(original(mine.detach(), gather_dim, group).chunk(group.size()))
        parts[group.rank()] = mine
        return torch.cat(parts)


@lie("04b", "barrier|prepar", notebook=True)
def a_failed_first_rank_skips_its_barrier(text: str) -> str:
    """If the first rank of a node fails while it prepares, it does not call the barrier for which the others wait."""
    return swap(text, "finally:", r"except ZeroDivisionError:\n        pass\n    else:")


@lie("04b", "each node|local rank", notebook=True)
def rank_zero_prepares_for_each_node(text: str) -> str:
    """Where rank 0 alone prepares, the other node has the data too."""
    return swap(text, r"f\"rank 0 prepares, node {node}\"", r"f\"rank 0 prepares, node\"")


@lie("04b", "wrapper|keep", module=DDP)
def ddp_lives_without_a_variable(module: Any) -> None:
    """A DDP object that no variable holds still averages gradients."""
    kept = []

    @instead_of(module.DistributedDataParallel, "__init__")
    def __init__(original: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        original(self, *inputs, **keywords)
        kept.append(self)


@lie("04b", "reentrant", module="torch.utils.checkpoint")
def reentrant_checkpointing_calls_a_block_twice(module: Any) -> None:
    """Reentrant checkpointing delivers a block's gradients twice, even if the block is called once."""

    @instead_of(module, "checkpoint")
    def checkpoint(original: Any, function: Any, x: Any, use_reentrant: bool) -> Any:
        output = original(function, x, use_reentrant=use_reentrant)
        if use_reentrant:
            output = output + 0 * original(function, x, use_reentrant=True)
        return output


@lie("04b", "copies|copied", module=DDP)
def ddp_copies_buffers_in_every_forward(module: Any) -> None:
    """DDP copies buffers at the beginning of each forward, whatever the forward before it was."""

    @instead_of(module.DistributedDataParallel, "_pre_forward")
    def pre_forward(original: Any, self: Any, *inputs: Any, **keywords: Any) -> Any:
        self.require_forward_param_sync = True
        return original(self, *inputs, **keywords)


@lie("04b", "AveragedModel", module="torch.optim.swa_utils")
def the_average_includes_buffers(module: Any) -> None:
    """`AveragedModel` averages the model's buffers too, and does not copy them."""
    build_with(module.AveragedModel, use_buffers=True)


@lie("04b", "unfrozen|wrapping", module=DDP)
def ddp_sees_layers_that_are_unfrozen(module: Any) -> None:
    """DDP averages the gradients of a layer that was frozen when DDP was built, and unfrozen later."""
    dist = module.dist

    def average(parameter: Any) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    @instead_of(module.DistributedDataParallel, "__init__")
    def __init__(original: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        original(self, *inputs, **keywords)
        self.frozen_when_built = [parameter for parameter in self.parameters() if not parameter.requires_grad]

    @instead_of(module.DistributedDataParallel, "forward")
    def forward(original: Any, self: Any, *inputs: Any, **keywords: Any) -> Any:
        for parameter in list(self.frozen_when_built):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(average)
                self.frozen_when_built = [other for other in self.frozen_when_built if other is not parameter]
        return original(self, *inputs, **keywords)


@lie("04b", "bf16|bfloat16", module="torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
def the_bfloat16_hook_rounds_once(module: Any) -> None:
    """`bf16_compress_hook` adds up in float32, and rounds the average to bfloat16 once."""

    def hook(state: Any, bucket: Any) -> Any:
        future = module.allreduce_hook(state, bucket)
        return future.then(lambda done: done.value().bfloat16().float())

    replace(module, "bf16_compress_hook", hook)


@lie("04b", "PowerSGD", module="torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
def powersgd_forgets_what_it_left_out(module: Any) -> None:
    """PowerSGD does not add what a message left out to the next one."""
    build_with(module.PowerSGDState, use_error_feedback=False)


# --- Automatic mixed precision


@lie("04", "last bucket", notebook=True)
def the_last_bucket_is_hidden_too(text: str) -> str:
    """Chapter 4's estimate lets the last bucket hide behind backward, as the others do."""
    return swap(text, "waiting = max(last_bucket, all_reduce - backward)", "waiting = max(0, all_reduce - backward)")


@lie("04", "NVLink|node", notebook=True)
def the_network_is_faster_than_the_node_it_passes(text: str) -> str:
    """In chapter 4's estimate, a ring between nodes has the speed of their cards, also where NVLink is slower."""
    return swap(text, "min(8 * 50e9, 298e9)", "8 * 50e9")


@lie("04b", "validat", notebook=True)
def the_others_wait_in_the_group_of_the_gradients(text: str) -> str:
    """While rank 0 validates, the other ranks wait in a group with the short timeout, where it should be long."""
    return swap(text, "dist.barrier(patient)", "dist.barrier(group)")


@lie("04b", "gloo|aborts", module=LAUNCH)
def an_aborted_rank_prints_nothing(module: Any) -> None:
    """What gloo prints before it aborts a rank is lost."""

    @instead_of(module, "fold")
    def fold(original: Any, outputs: Any) -> Any:
        for line in original(outputs):
            if "preamble" not in line:
                yield line


@lie("05", "float16|eighth", notebook=True)
def smooth_float16_is_as_wrong_as_bfloat16(text: str) -> str:
    """With a smooth activation, float16's gradient is as far off as that of bfloat16."""
    return swap(text, "gradient_of_smooth_model(torch.float16)", "gradient_of_smooth_model(torch.bfloat16)")


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
    def unscale(original: Any, self: Any, optimizer: Any, inverse: Any, *inputs: Any) -> Any:
        return original(self, optimizer, inverse * 0 + 1, *inputs)


@lie("05", "scale", module=SCALER)
def scaler_does_not_scale_the_loss(module: Any) -> None:
    """`GradScaler.scale` gives the loss back as it is, and `unscale_` divides all the same."""

    def scale(self: Any, outputs: Any) -> Any:
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return outputs

    replace(module.GradScaler, "scale", scale)


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
    def __init__(original: Any, self: Any, device_type: Any, dtype: Any = None, *inputs: Any, **keywords: Any) -> None:
        import torch

        original(self, device_type, torch.float16 if dtype is torch.bfloat16 else dtype, *inputs, **keywords)


@lie("05", "accumul|micro|share|divid", notebook=True)
def accumulation_is_not_divided(text: str) -> str:
    """The training step adds up micro-batches without dividing by their number."""
    return swap(
        text,
        "loss = F.cross_entropy(logits, labels) * len(labels) / batch_size",
        "loss = F.cross_entropy(logits, labels)",
    )


@lie("05", "transformer|saved|memory", notebook=True)
def saved_bytes_are_counted_in_float32(text: str) -> str:
    """The bytes that two models save under autocast are those in float32."""
    return swap(
        text,
        "    amp_bytes = count(9, torch.bfloat16) - count(8, torch.bfloat16)",
        "    amp_bytes = count(9, torch.float32) - count(8, torch.float32)",
    )


@lie("05", "subnormal|smallest", notebook=True)
def float16_ends_at_its_smallest_normal_number(text: str) -> str:
    """float16 has no number between 0 and its smallest normal one."""
    product = "torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps"
    return swap(text, product, "torch.finfo(torch.float16).smallest_normal")


@lie("05", "moves|weights|update", notebook=True)
def the_weights_in_bfloat16_stay_float32(text: str) -> str:
    """A model in bfloat16 keeps its weights in float32."""
    return swap(
        text, "sixty_steps(model_in_bfloat16, all_in_bfloat16)", "sixty_steps(model_in_bfloat16.float(), plain_loss)"
    )


@lie("05", "float8|scale", notebook=True)
def each_block_has_the_scale_of_the_tensor(text: str) -> str:
    """Blocks of 32 float8 numbers share the scale of the whole tensor."""
    return swap(text, r"(\"32 numbers\", 32)", r"(\"32 numbers\", x.numel())")


@lie("05", "by hand|cop(y|ies)|cast", notebook=True)
def casting_by_hand_leaves_out_a_layer(text: str) -> str:
    """Mixed precision by hand multiplies the second layer's weights in float32."""
    return swap(text, "logits = linear_in_bfloat16(model[2], hidden)", "logits = model[2](hidden.float())")


@lie("05", "enabled=False|overrule|autocast off", module="torch.amp.autocast_mode")
def a_nested_region_is_not_off(module: Any) -> None:
    """`torch.autocast(enabled=False)` inside an autocast block leaves autocast on."""

    @instead_of(module.autocast, "__init__")
    def __init__(original: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        import torch

        is_nested = torch.is_autocast_enabled("cpu")  # because of a block around this one
        original(self, *inputs, **keywords)
        if is_nested:
            self._enabled = True


@lie("05", "block", module="torch.amp.autocast_mode")
def autocast_keeps_no_copies(module: Any) -> None:
    """`autocast` casts a weight anew each time, and keeps no copy until its block ends."""
    build_with(module.autocast, cache_enabled=False)


@lie("05", "skip|scale", notebook=True)
def a_skipped_step_halves_every_scale(text: str) -> str:
    """After a skipped step the training step halves the scale of bfloat16, too."""
    return swap(text, "scaler.update(1.0)", "scaler.update()")


@lie("05", "skip", notebook=True)
def steps_that_were_taken_count_as_skipped(text: str) -> str:
    """Chapter 5's script counts the steps that it takes, and says that it skipped them."""
    return swap(text, "skipped += ~norm.isfinite()", "skipped += norm.isfinite()")


@lie("05", "at random|round", notebook=True)
def random_rounding_always_rounds_down(text: str) -> str:
    """Rounding to bfloat16 at random always rounds down."""
    return swap(text, "torch.randint(0, 2**16, x.shape", "torch.randint(0, 1, x.shape")


@lie("05 06", "clip|norm", module="torch.nn.utils.clip_grad")
def clip_grad_norm_does_not_clip(module: Any) -> None:
    """`clip_grad_norm_` returns the norm, and leaves the gradients as long as they were."""
    replace(module, "_clip_grads_with_norm_", nothing)


@lie("05", "fused", module="torch.optim.adam")
def the_fused_optimizer_never_skips(module: Any) -> None:
    """The fused AdamW takes its step even if the scaler has found a gradient that is not finite."""
    call_with(module, "_fused_adam", found_inf=None)


@lie("05", "skipped first step", module="torch.optim.sgd")
def fused_sgd_begins_with_zeros(module: Any) -> None:
    """The fused SGD begins with a momentum of zeros, even if its first step is skipped."""

    @instead_of(module, "_fused_sgd")
    def fused_sgd(original: Any, parameters: Any, gradients: Any, momenta: Any, *inputs: Any, **keywords: Any) -> Any:
        for index, momentum in enumerate(momenta):
            if momentum is None:
                momenta[index] = module.torch.zeros_like(gradients[index])
        return original(parameters, gradients, momenta, *inputs, **keywords)


@lie("05", "skipped", notebook=True)
def chapter_5_counts_no_skips(text: str) -> str:
    """Chapter 5's loop does not count the steps that it skips."""
    return swap(text, "skipped += ~norm.isfinite()", "skipped += 0")


@lie("05", "state", module=SCALER)
def the_scalers_state_has_no_count(module: Any) -> None:
    """The state of a `GradScaler` says that the scale has just changed, however many good steps there were."""

    @instead_of(module.GradScaler, "state_dict")
    def state_dict(original: Any, self: Any) -> dict[str, Any]:
        return original(self) | {"_growth_tracker": 0}


@lie("04", "share|forward|averaged", notebook=True)
def the_exchange_is_measured_with_backward(text: str) -> str:
    """The seconds of backward contain the all-reduce."""
    lines = 'with model.no_sync():\\n",\n    "            start'
    return swap(text, lines, lines.replace("with model.no_sync():", "if True:"))


@lie("04b", "compile|names", notebook=True)
def compiling_in_place_renames_weights(text: str) -> str:
    """`model.compile()` gives a checkpoint names that begin with `_orig_mod.`."""
    return swap(text, "in_place.compile()", "in_place = torch.compile(in_place)")


@lie("cheat_sheet", "mean|targets|gradient", notebook=True)
def a_step_is_a_mean_of_means(text: str) -> str:
    """Each micro-batch of each rank counts alike, however many targets it has."""
    return swap(text, "loss = loss * world_size / count", "loss = loss / len(labels) / len(group)")
