"""Lies (planted faults) about pipelines, tensor parallelism, long sequences and experts."""

import contextlib
from typing import Any

from sabotage.lies.telling_lies import C10D, DDP, FSDP, build_with, instead_of, lie, nothing, replace, swap

# --- Pipelines


@lie("08", "order|1F1B|schedule", module="torch.distributed.pipelining.schedules")
def one_forward_one_backward_is_gpipe(module: Any) -> None:
    """`Schedule1F1B` runs all forwards, and then all backwards."""
    replace(module.Schedule1F1B, "_step_microbatches", module.ScheduleGPipe._step_microbatches)


@lie("08", "gradient|micro-batch", module="torch.distributed.pipelining.schedules")
def a_micro_batch_is_dropped(module: Any) -> None:
    """A schedule computes the first micro-batch twice, and never the last."""

    @instead_of(module._PipelineSchedule, "_split_inputs")
    def split_inputs(original: Any, self: Any, *inputs: Any, **keywords: Any) -> Any:
        # For each micro-batch: its positional arguments, and its keyword arguments.
        positional, by_name = original(self, *inputs, **keywords)
        positional[-1] = positional[0]
        by_name[-1] = by_name[0]
        return positional, by_name


@lie("08 decision_guide", "divid|micro-batch|gradient", module="torch.distributed.pipelining.stage")
def gradients_are_not_divided_by_micro_batches(module: Any) -> None:
    """A schedule adds the micro-batches' gradients up, and does not divide by their number."""
    replace(module._PipelineStageBase, "scale_grads", nothing)


@lie("08", "bubble|idle", notebook=True)
def bubble_is_off_by_one(text: str) -> str:
    """The model of a schedule counts a rank's work as idle time."""
    return swap(text, "/ work - 1", "/ work")


@lie("08", "schedule|gradient", module="torch.distributed.pipelining.schedules")
def a_v_of_stages_counts_losses_twice(module: Any) -> None:
    """`ScheduleZBVZeroBubble` takes each micro-batch's loss twice."""

    @instead_of(module.ScheduleZBVZeroBubble, "__init__")
    def __init__(original: Any, self: Any, *inputs: Any, loss_fn: Any, **keywords: Any) -> None:
        def twice_the_loss(*values: Any) -> Any:
            return 2 * loss_fn(*values)

        original(self, *inputs, loss_fn=twice_the_loss, **keywords)


@lie("08", "eval|norm", module="torch.distributed.pipelining.schedules")
def an_evaluation_leaves_gradients_alone(module: Any) -> None:
    """A schedule's `eval` does not touch the gradients."""

    @instead_of(module._PipelineSchedule, "eval")
    def evaluate(original: Any, self: Any, *inputs: Any, **keywords: Any) -> Any:
        # The real `eval` divides the gradients of the last step by the number of micro-batches if this is True.
        scale_grads_before = self.scale_grads
        self.scale_grads = False
        original(self, *inputs, **keywords)
        self.scale_grads = scale_grads_before


@lie("08", "fewer|micro-batches", module="torch.distributed.pipelining.schedules")
def gpipe_needs_as_many_micro_batches_as_stages(module: Any) -> None:
    """`ScheduleGPipe` refuses fewer micro-batches than stages, as `Schedule1F1B` does."""

    @instead_of(module.ScheduleGPipe, "__init__")
    def __init__(original: Any, self: Any, stage: Any, n_microbatches: int, *inputs: Any, **keywords: Any) -> None:
        if n_microbatches < stage.num_stages:
            raise ValueError("Number of microbatches must be greater than or equal to the number of stages")
        original(self, stage, n_microbatches, *inputs, **keywords)


@lie("08", "schedule|order", module="torch.distributed.pipelining.schedules")
def looped_bfs_alternates_its_stages(module: Any) -> None:
    """`ScheduleLoopedBFS` runs its stages' forwards in turn, and not all of one stage first."""

    @instead_of(module.ScheduleLoopedBFS, "_calculate_single_rank_operations")
    def calculate(original: Any, self: Any, rank: int) -> Any:
        # The rank's actions in order: None while it waits, then all forwards of its two stages, then the backwards.
        actions = original(self, rank)
        start = 0  # of the forwards
        while actions[start] is None:
            start += 1
        end = start + 2 * self._n_microbatches
        actions[start:end] = sorted(actions[start:end], key=lambda action: action.microbatch_index)
        return actions


@lie("08", "hold|activations|memory", notebook=True)
def the_meter_keeps_a_tensors_history(text: str) -> str:
    """The meter of activations keeps each tensor with its history, and so keeps some for ever."""
    return swap(text, "self.tensor = tensor.detach()", "self.tensor = tensor")


@lie("08", "norm|both|copies", notebook=True)
def both_copies_of_a_tied_weight_count(text: str) -> str:
    """A weight that the first and the last stage share belongs to the norm of each."""
    without = "counted = [weight for weight in counted if weight is not tied]"
    return swap(text, without, "counted = list(counted)")


@lie("08", "head|stage|slow", notebook=True)
def the_last_stage_has_as_many_blocks(text: str) -> str:
    """The division of the blocks into stages does not count the head."""
    return swap(text, "slots = layers + last_less", "slots = layers")


@lie("08", "slow|stage|cost", notebook=True)
def a_slow_stage_is_as_fast_as_the_first(text: str) -> str:
    """The model of a schedule takes all stages for as fast as the first."""
    return swap(text, "COST[work.kind] * costs[work.stage]", "COST[work.kind] * costs[0]")


@lie("08", "pace|slow|unequal|model", notebook=True)
def a_slow_stage_sleeps_no_longer(text: str) -> str:
    """The measured stages all take equally long."""
    return swap(text, "self.unit * self.cost * COST[kind]", "self.unit * COST[kind]")


@lie("08", "norm|clip", notebook=True)
def each_stage_clips_by_its_own_norm(text: str) -> str:
    """`clip_together` does not add up the ranks' squares."""
    return swap(text, "dist.all_reduce(squares, group=group)", "pass")


@lie("08", "norm|clip|replica", notebook=True)
def replicas_are_counted_again_in_the_norm(text: str) -> str:
    """`clip_together` adds up the squares of all ranks, and not of one pipeline alone."""
    return swap(text, "dist.all_reduce(squares, group=group)", "dist.all_reduce(squares)")


@lie("08", "finite|nan", notebook=True)
def a_step_that_is_not_finite_is_taken(text: str) -> str:
    """The pipeline's trainer takes a step whose gradient is not finite."""
    return swap(text, "if norm.isfinite():", "if True:")


@lie("08", "finite|nan|in a row", notebook=True)
def skipped_steps_are_counted_over_the_whole_run(text: str) -> str:
    """The pipeline's trainer counts all skipped steps, also those before a step that it took."""
    return swap(text, '"                skipped = 0\\n"', '"                pass\\n"')


@lie("08", "step|divid|accumul", notebook=True)
def a_step_forgets_the_gradients_before_it(text: str) -> str:
    """A pipeline's step removes the gradients that an earlier step has left, and does not add to them."""
    losses = '    losses: list[Tensor] = []\\n"'
    return swap(text, losses, losses.replace('\\n"', '; [stage.zero_grad() for stage in stages]\\n"'))


@lie("08", "tie|embedding|copy", notebook=True)
def copies_of_a_tied_weight_are_not_summed(text: str) -> str:
    """The first and the last stage share a weight, and nobody sums its two gradients."""
    return swap(text, "dist.all_reduce(tied.grad, group=ends)", "dist.barrier(group=ends)")


@lie("08", "gradient|waiting|reduce_dtype", notebook=True)
def waiting_gradients_are_in_bfloat16(text: str) -> str:
    """The whole gradients that a stage keeps between two micro-batches are in bfloat16."""
    in_float32 = "MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)"
    return swap(text, in_float32, in_float32.replace("float32", "bfloat16"))


@lie("08", "norm|clip|frozen", notebook=True)
def a_frozen_weight_of_a_stage_has_a_norm(text: str) -> str:
    """The norm of all stages takes weights that have no gradient, too."""
    return swap(text, "if weight.grad is not None:  # it is None if the weight is frozen", "if True:")


@lie("08", "reduce|FSDP", module="torch.distributed.pipelining.stage")
def a_stage_reduces_after_every_micro_batch(module: Any) -> None:
    """A `PipelineStage` lets FSDP reduce the gradient after the backward of each micro-batch."""
    replace(module.FSDPModule, "set_requires_gradient_sync", nothing)


@lie("08", "gather|reshard", module="torch.distributed.fsdp")
def a_stage_gathers_for_every_micro_batch(module: Any) -> None:
    """`fully_shard` frees a stage's blocks after each forward, whatever `reshard_after_forward` says."""
    original = module.fully_shard
    replace(
        module,
        "fully_shard",
        lambda *inputs, **options: original(*inputs, **{**options, "reshard_after_forward": True}),
    )


# --- Tensor parallel


@lie("07", "rank 0", module="torch.distributed.tensor._api")
def every_rank_divides_its_own_weights(module: Any) -> None:
    """`distribute_tensor` takes each rank's own numbers, and does not send the first rank's."""
    original = module.distribute_tensor
    replace(
        module,
        "distribute_tensor",
        lambda *inputs, **keywords: original(*inputs, **{**keywords, "src_data_rank": None}),
    )


@lie("07", "add|sum", module="torch.distributed.tensor.placement_types")
def summands_are_not_added(module: Any) -> None:
    """A DTensor's `Partial()` becomes `Replicate()` without a sum over the ranks."""
    replace(module.Partial, "_reduce_value", lambda self, tensor, mesh, dim: tensor)


@lie("07", "all-reduce|count", module="torch.distributed.tensor.debug._comm_mode")
def a_collective_is_not_counted(module: Any) -> None:
    """`CommDebugMode` leaves all-reduces out."""

    @instead_of(module.CommDebugMode, "get_comm_counts")
    def get_comm_counts(original: Any, self: Any) -> Any:
        counts = original(self)  # {operation: how often it was called}
        return {operation: count for operation, count in counts.items() if "all_reduce" not in str(operation)}


@lie("07", "norm|clip", module="torch.nn.utils.clip_grad")
def a_rank_clips_by_its_own_norm(module: Any) -> None:
    """The norm of the gradients is that of the parts that the rank holds."""

    @instead_of(module, "_get_total_norm")
    def get_total_norm(original: Any, tensors: Any, *inputs: Any, **keywords: Any) -> Any:
        # Of a DTensor, the part that this rank holds. An ordinary tensor has no _local_tensor.
        local_tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        return original(local_tensors, *inputs, **keywords)


@lie("07", "seed|differ|one process", notebook=True)
def the_check_finds_no_difference(text: str) -> str:
    """`equal_to_one_process` finds no difference, whatever it compares."""
    return swap(text, "(found[name] - reference).abs().max()", "(reference - reference).abs().max()")


@lie("07", "norm|[Ss]equence ?[Pp]arallel", module="torch.distributed.tensor.parallel.style")
def sequence_parallel_does_nothing(module: Any) -> None:
    """`SequenceParallel` leaves its layer as it was."""
    replace(module.SequenceParallel, "_apply", lambda self, layer, mesh: layer)


@lie("07", "fused|AdamW|norm", module="torch.optim.adamw")
def adamw_is_never_fused(module: Any) -> None:
    """`AdamW(fused=True)` loops over its parameters."""
    build_with(module.AdamW, fused=False)


@lie("07", "loss", module="torch.distributed.tensor.parallel.loss")
def the_divided_loss_takes_each_ranks_own_maximum(module: Any) -> None:
    """`loss_parallel` subtracts each rank's own largest logit, not the largest of all ranks."""
    original = module.funcol.all_reduce

    class WithoutMaximum:
        def all_reduce(tensor: Any, reduceOp: Any, group: Any) -> Any:
            return tensor if reduceOp == "MAX" else original(tensor, reduceOp, group)

    replace(module, "funcol", WithoutMaximum)


@lie("07b", "operator|strategy|local_map", module="torch.distributed.tensor.experimental._func_map")
def local_map_redistributes_nothing(module: Any) -> None:
    """`local_map` takes each rank's part as it is, whatever its placement, and redistributes nothing."""

    @instead_of(module, "local_map")
    def local_map(original: Any, *inputs: Any, in_placements: Any = None, **keywords: Any) -> Any:
        return original(*inputs, **keywords)


@lie("07", "gradient|backward", notebook=True)
def f_sums_no_gradients(text: str) -> str:
    """Megatron's f, written by hand, sums nothing in backward."""
    return swap(text, "dist.all_reduce(gradient, group=ctx.group)", "dist.barrier(group=ctx.group)")


@lie("07", "bias|sum", notebook=True)
def every_rank_adds_the_bias_of_the_rows(text: str) -> str:
    """The rows by hand add the bias once for each rank."""
    return swap(text, "return y + self.bias", "return y + dist.get_world_size(self.group) * self.bias")


@lie("07", "fused|qkv|no error", notebook=True)
def thirds_of_a_fused_matrix_are_ordered_by_head(text: str) -> str:
    """The block with the fused matrix takes its columns by head, so that a run of them is a run of heads."""
    by_head = "self.qkv(y).unflatten(-1, (-1, 3 * self.head_width)).chunk(3, dim=-1)"
    thirds = "query, key, value = self.qkv(y).chunk(3, dim=-1)"
    return swap(text, thirds, f"query, key, value = (part.flatten(2) for part in {by_head})")


@lie("07", "head|order", notebook=True)
def a_fused_weight_is_not_reordered(text: str) -> str:
    """The rows of the fused weight stay as they were, and are not ordered by head."""
    return swap(text, ".transpose(0, 1).flatten(0, 2)", ".flatten(0, 2)")


@lie("07", "group|rows|heads", notebook=True)
def a_fused_weight_with_groups_is_not_reordered(text: str) -> str:
    """The rows of a fused weight with fewer heads of keys stay as they were, and are not ordered by group."""
    return swap(text, "return torch.cat(groups, dim=1).flatten(0, 1)", "return tensor")


@lie("07", "by_head|by group|error", notebook=True)
def heads_are_as_good_as_groups(text: str) -> str:
    """The model whose fused matrix is ordered by head is the one that is ordered by group."""
    wrong = "wrong = relative_error(reordered(by_head, heads=8)"
    return swap(text, wrong, "wrong = relative_error(reordered(by_group, heads=8, kv_heads=2)")


@lie("07", "key|value|gradient", notebook=True)
def copies_of_the_keys_need_no_sum(text: str) -> str:
    """The ranks share a head of keys and values, and nobody sums its gradient."""
    return swap(text, "return CopyToRanks.apply(output, group)", "return output")


@lie("07", "norm|heads|gradient", notebook=True)
def norms_of_queries_and_keys_are_left_out(text: str) -> str:
    """The norms of queries and keys are not in the plan, and nobody sums their gradients."""
    plan = 'plan = MATRICES | {\\"query_norm\\": on_heads, \\"key_norm\\": on_heads}'
    return swap(text, plan, "plan = MATRICES")


@lie("07", "message|bandwidth", notebook=True)
def a_message_of_32_mib_gets_the_whole_bandwidth(text: str) -> str:
    """A message of 32 MiB travels as fast as one of a gigabyte."""
    return swap(text, "NVLINK_32_MIB = 298e9", "NVLINK_32_MIB = 481e9")


@lie("07", "all-reduce|one|sum", module="torch.distributed.tensor.parallel.style")
def each_layer_sums_its_own_gradient(module: Any) -> None:
    """`PrepareModuleOutput` leaves its layer as it was, so that query, key and value get a plain tensor."""
    replace(module.PrepareModuleOutput, "_apply", lambda self, layer, mesh: layer)


@lie("07", "time|NVLink|bytes", notebook=True)
def a_ring_sends_each_byte_once(text: str) -> str:
    """An all-reduce sends each byte once, and not twice."""
    return swap(text, "all_reduces * 2 * (tp - 1) / tp * 2 * width", "all_reduces * (tp - 1) / tp * 2 * width")


@lie("07", "replica|seed", notebook=True)
def fully_shard_sends_the_weights_of_the_first_replica(text: str) -> str:
    """Replicas that were initialized with different seeds start from the same weights."""
    return swap(text, "model = parallelize(build(seed=replica), mesh[", "model = parallelize(build(seed=0), mesh[")


@lie("07", "validation|evaluate|loss", notebook=True)
def ranks_of_a_group_count_their_images_again(text: str) -> str:
    """The validation loss counts the images once for each rank of a tp group."""
    return swap(text, 'total.item() / mesh[\\"tp\\"].size()', "total.item()")


@lie("07", "mesh|order|replica", notebook=True)
def the_replica_follows_from_the_rank(text: str) -> str:
    """The replica of a rank is computed from the rank's number, whatever the order of the mesh."""
    return swap(text, "+ mesh.get_local_rank(name)", '+ dist.get_rank() // mesh[\\"tp\\"].size()')


@lie("07b", "dropout|seed", notebook=True)
def each_ranks_own_numbers_are_the_same(text: str) -> str:
    """The random numbers for the dropout of parts begin with the same seed on every rank."""
    return swap(text, "seed * dist.get_world_size() + dist.get_rank()", "seed * dist.get_world_size()")


@lie("07b", "dropout|seed|pattern", notebook=True)
def a_pattern_wanders_from_rank_to_rank(text: str) -> str:
    """The seed for the dropout of parts has the rank added, so that patterns repeat with the next seed."""
    return swap(text, "seed * dist.get_world_size() + dist.get_rank()", "seed + dist.get_rank()")


@lie("07b", "dropout|seed|pattern", notebook=True)
def all_layers_drop_the_same_places(text: str) -> str:
    """The seed for the dropout of parts does not depend on the layer."""
    return swap(text, "(step * micro_batches + micro_batch) * dropouts + dropout", "step * micro_batches + micro_batch")


@lie("07b", "recomput|dropout", notebook=True)
def own_numbers_continue_where_they_were(text: str) -> str:
    """`own_numbers` is not seeded where it is entered, so recomputation in backward drops other places."""
    return swap(text, "torch.manual_seed(2**31 + own)", "torch.seed()")


@lie("07", "tie|head", notebook=True)
def a_tied_weight_stays_tied(text: str) -> str:
    """`parallelize_module` leaves a weight that two modules share shared."""
    divided = 'parallelize(tie(build()), mesh[\\"tp\\"], sequence=True, split_loss=True)'
    return swap(text, divided, f"tie({divided})")


@lie("07", "whole|keep|kept", notebook=True)
def sequence_parallelism_keeps_no_fewer_tensors(text: str) -> str:
    """Sequence parallelism keeps as many whole tensors for backward as tensor parallelism alone."""
    return swap(text, "parallelize(build(layers=2), mesh, sequence=sequence)", "parallelize(build(layers=2), mesh)")


@lie("07", "norm|mesh|frozen", notebook=True)
def a_frozen_weight_has_a_norm(text: str) -> str:
    """The function that combines the norms of several meshes takes weights that have no gradient, too."""
    return swap(text, "if parameter.grad is None:", "if False:")


@lie("07", "shape|gradient", notebook=True)
def gradients_of_another_shape_are_passed_over(text: str) -> str:
    """`equal_to_one_process` leaves out a gradient that has another shape, as it does with outputs."""
    call = "check_shape(name, found[name], reference)"
    return swap(text, call, "if found[name].shape != reference.shape: continue")


@lie("07", "recompute|sum|all-reduce", notebook=True)
def a_checkpoint_always_stops_early(text: str) -> str:
    """A recomputed block that runs to its end sends no more sums than one that stops early."""
    return swap(text, "set_checkpoint_early_stop(early_stop)", "set_checkpoint_early_stop(True)")


@lie("07", "embedding", notebook=True)
def a_divided_embedding_sends_all_tokens(text: str) -> str:
    """The divided embedding gives every rank all tokens, by an all-reduce."""
    return swap(
        text,
        "rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))",
        "rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())",
    )


@lie("07", "norm|SequenceParallel", notebook=True)
def norms_are_not_broadcast(text: str) -> str:
    """The norms of the ranks are not made equal before the model is divided."""
    return swap(text, "if equal_before:", "if False:")


@lie("07", "CPU|DTensor", notebook=True)
def a_dtensor_costs_the_cpu_nothing(text: str) -> str:
    """The addition that is measured as that of DTensors adds plain tensors."""
    return swap(text, "seconds(lambda: on_mesh + on_mesh)", "seconds(lambda: plain + plain)")


@lie("07", "embedding|head|unit|block", notebook=True)
def the_embedding_is_not_divided_in_the_model(text: str) -> str:
    """`parallelize_outside_blocks` leaves the embedding of the grey levels whole on every rank."""
    level = '\\"level\\": RowwiseParallel(input_layouts=Replicate(), use_local_output=False),'
    return swap(text, level, "")


@lie("07", "block|whole|sharded", notebook=True)
def the_script_leaves_the_ends_of_the_model_whole(text: str) -> str:
    """The script shards the blocks, and leaves the embeddings, the last norm and the head as they are."""
    sharded = 'shard_outside_blocks(model, mesh[\\"dp\\"], policy)'
    return swap(text, sharded, "pass")


@lie("07b", "type|collective", module="spmd_types.checker")
def the_checker_of_types_checks_nothing(module: Any) -> None:
    """`spmd_types` takes every operation for right."""
    replace(module, "typecheck", contextlib.nullcontext)


@lie("09", "ring|keys", module=C10D)
def messages_travel_the_other_way(c10d: Any) -> None:
    """`batch_isend_irecv` sends to the rank before, and receives from the rank after."""

    @instead_of(c10d, "batch_isend_irecv")
    def batch_isend_irecv(original: Any, operations: Any) -> Any:
        # In the chapter's ring each rank sends to the rank after it, and receives from the rank before it.
        sends = [operation for operation in operations if operation.op is c10d.isend]
        receives = [operation for operation in operations if operation.op is c10d.irecv]
        rank_after = sends[0].peer
        rank_before = receives[0].peer
        # With this bug, the two ranks change places.
        for send in sends:
            send.peer = rank_before
        for receive in receives:
            receive.peer = rank_after
        for operation in operations:
            operation.group_peer = c10d.get_group_rank(operation.group, operation.peer)
        return original(operations)


@lie("09 09c", "Ulysses|all-to-all|expert", module="torch.distributed._functional_collectives")
def all_to_all_sends_no_gradient_back(module: Any) -> None:
    """The functional `all_to_all_single` gives what it received a gradient, and what it sent none."""

    @instead_of(module, "all_to_all_single")
    def all_to_all_single(original: Any, tensor: Any, *inputs: Any, **keywords: Any) -> Any:
        return original(tensor.detach(), *inputs, **keywords) + 0 * tensor.sum()


@lie("09", "zigzag|scores|order", notebook=True)
def zigzag_is_not_mirrored(text: str) -> str:
    """In zigzag order each rank gets two early chunks in a row."""
    return swap(text, "chunks[rank] + chunks[-1 - rank]", "chunks[2 * rank] + chunks[2 * rank + 1]")


@lie("09", "float32|bfloat16", notebook=True)
def the_ring_adds_up_in_the_dtype_of_its_queries(text: str) -> str:
    """The ring keeps its sums in the dtype of the queries, and not in float32."""
    return swap(text, "    out = torch.zeros_like(query, dtype=torch.float32)", "    out = torch.zeros_like(query)")


@lie("09", "ring|heads|grouped", notebook=True)
def a_shared_head_of_keys_gets_one_gradient(text: str) -> str:
    """A head of keys that several heads of queries share gets the gradient of the first of them only."""
    return swap(text, "grad_key.sum(2, keepdim=True), grad_value", "grad_key[:, :, :1], grad_value")


@lie("09", "grouped|heads", notebook=True)
def ulysses_copies_keys_before_it_sends_them(text: str) -> str:
    """With grouped queries Ulysses sends a copy of the keys and values for each head of queries."""
    copies = "(each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))"
    sent = "query = exchange(query, split_dim=1, join_dim=2, group=group)"
    return swap(text, sent, f"key, value = {copies}; {sent}")


@lie("09", "heads", notebook=True)
def ulysses_does_not_check_the_heads_of_keys(text: str) -> str:
    """Ulysses looks whether the ranks divide the heads of queries, but not those of keys."""
    return swap(text, r"(\"keys\", key.shape[1])", r"(\"keys\", query.shape[1])")


@lie("09", "position", notebook=True)
def each_rank_counts_its_positions_from_0(text: str) -> str:
    """The rotation of queries and keys counts the positions of every rank from 0."""
    return swap(text, "    if counted_from_0:", "    if True:")


@lie("09", "gather|keys", notebook=True)
def gathered_keys_are_masked_by_their_place(text: str) -> str:
    """The mask takes the place of a gathered key for its position."""
    gathered = "key_positions = torch.tensor(shares, device=key.device).flatten()"
    return swap(text, gathered, "key_positions = torch.arange(key.shape[2], device=key.device)")


BALANCERS = "torch.distributed.tensor.experimental._context_parallel._load_balancer"
CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"


@lie("09 09b", "order|zigzag|balanc", module=BALANCERS)
def a_head_tail_balancer_divides_in_order(module: Any) -> None:
    """`_HeadTailLoadBalancer` gives each rank one chunk of the sequence, and not an early and a late one."""

    @instead_of(module._HeadTailLoadBalancer, "_generate_indices")
    def generate_indices(original: Any, *inputs: Any, **keywords: Any) -> Any:
        return original(*inputs, **keywords).sort().values


# --- Long sequences in practice


@lie("09b", "count|loss|step", notebook=True)
def each_rank_counts_its_own_targets(text: str) -> str:
    """In the training step each rank divides its loss by the targets that it counts itself."""
    return swap(text, "    dist.all_reduce(counted)", "    counted = counted.clamp(min=1)")


@lie("09b", "gather|ring", module=CONTEXT_PARALLEL)
def the_ring_sends_in_a_ring_by_default(module: Any) -> None:
    """PyTorch's ring sends each piece to the next rank, also if nobody has called `set_rotate_method`."""
    replace(module._cp_options, "rotate_method", module._RotateMethod.ALL_TO_ALL)


@lie("09b", "balance|block", module=BALANCERS)
def ptrr_deals_rows_out_in_order(module: Any) -> None:
    """`_PTRRLoadBalancer` does not look at the mask, and gives each rank its rows in order."""

    def in_order(process_time: Any, group_size: int) -> Any:
        return process_time.argsort().sort().values.view(group_size, -1)

    replace(module._PTRRLoadBalancer, "ptrr_scheduling", staticmethod(in_order))


@lie("09b", "document|mask", notebook=True)
def a_document_sees_earlier_ones(text: str) -> str:
    """The document mask lets a position look at earlier documents."""
    return swap(text, "(document[query] == document[key])", "(document[query] >= document[key])")


@lie("09b", "gather", notebook=True)
def gathering_counts_only_the_forward(text: str) -> str:
    """The counter of bytes leaves the backward out."""
    return swap(text, r"_opname.startswith(\"flex_cp_allgather\")", r"_opname == \"flex_cp_allgather\"")


# --- Experts


@lie("09c", "balance|count", notebook=True)
def each_rank_balances_its_own_experts(text: str) -> str:
    """The balance loss counts only this rank's tokens."""
    return swap(text, "    dist.all_reduce(everywhere, group=group)", "    dist.get_world_size()")


@lie("09c", "balance|average|ranks", notebook=True)
def the_balance_loss_is_not_multiplied_by_the_ranks(text: str) -> str:
    """The parts of the balance loss sum to it over the ranks, though FSDP averages."""
    return swap(text, "return dist.get_world_size(group) * part_of_rank", "return part_of_rank")


@lie("09c", "bias|buffer|bfloat16", notebook=True)
def the_expert_bias_is_cast_with_its_layer(text: str) -> str:
    """The bias of the experts becomes bfloat16 with the rest of the layer."""
    return swap(text, "layer.bias = layer.bias.float()", "layer.bias = layer.bias.bfloat16()")


@lie("09c", "time to send|backward|step", notebook=True)
def a_step_of_experts_has_no_backward(text: str) -> str:
    """The cost of experts takes the operations of forward for those of a step."""
    return swap(text, "operations = (6 + 12) * hidden", "operations = 6 * hidden")


@lie("09c", "token|expert", notebook=True)
def a_rank_without_tokens_computes_nothing(text: str) -> str:
    """A rank that gets no token leaves its experts out, and they get no gradient."""
    computed = "done = grouped_experts(arrived[order], received.sum(0), up, down)"
    return swap(text, computed, f"{computed} if len(arrived) else arrived")


@lie("09c", "DDP|expert", module=DDP)
def ddp_averages_what_it_should_ignore(module: Any) -> None:
    """DDP averages parameters that it was told to ignore."""
    replace(module.DistributedDataParallel, "_set_params_and_buffers_to_ignore_for_model", staticmethod(nothing))


@lie("09c", "bias|weight", notebook=True)
def the_expert_bias_enters_the_weights(text: str) -> str:
    """The bias that balances the experts is part of the weights of their outputs, too."""
    return swap(text, "weights = scores.gather(-1, chosen)", "weights = (scores + bias).gather(-1, chosen)")


@lie("09c", "bias|busiest", notebook=True)
def the_expert_bias_goes_the_wrong_way(text: str) -> str:
    """The bias rises for the experts that got more copies than the mean."""
    return swap(text, "torch.sign(counts.mean() - counts)", "torch.sign(counts - counts.mean())")


@lie("09c", "bias|ranks", notebook=True)
def each_rank_updates_its_own_expert_bias(text: str) -> str:
    """The bias follows the tokens of this rank alone."""
    summed = "    dist.all_reduce(counts, group=group)  # of all ranks that have this router"
    return swap(text, summed, "    dist.get_world_size(group)")


@lie("09c", "router|float32|bfloat16", notebook=True)
def the_router_computes_in_bfloat16(text: str) -> str:
    """Under autocast the router computes in bfloat16, like the rest of the model."""
    as_outside = "enabled=torch.is_autocast_enabled(x.device.type)"
    return swap(text, "autocast(x.device.type, enabled=False)", f"autocast(x.device.type, {as_outside})")


@lie("09c", "mesh|expert|dp", notebook=True)
def experts_are_summed_over_all_ranks(text: str) -> str:
    """The gradients of experts are summed over all ranks, and not over their copies alone."""
    summed = r"dist.all_reduce(weight.grad, group=mesh[\"dp\"].get_group())"
    return swap(text, summed, "dist.all_reduce(weight.grad)")


@lie("09c", "group|loop|product", notebook=True)
def a_group_of_rows_begins_where_it_should_end(text: str) -> str:
    """The grouped product is told where each group begins, and not where it ends."""
    ends = "ends = counts.cumsum(0, dtype=torch.int32)"
    return swap(text, ends, f"{ends} - counts.int()")


@lie("09c", "bfloat16|dtype", notebook=True)
def the_copies_are_added_in_the_dtype_of_the_tokens(text: str) -> str:
    """The copies of a token are added up in the dtype of the tokens, though their weights are float32."""
    summed = "return out.index_add(0, token, weighted).to(x.dtype)"
    return swap(text, summed, "return out.to(x.dtype).index_add(0, token, weighted)")


@lie("09c", "norm|clip", notebook=True)
def each_rank_clips_by_the_experts_that_it_has(text: str) -> str:
    """The norm of the gradient has only the experts at this rank's place along `ep`."""
    return swap(text, "dist.all_reduce(squares, group=ep_group)", "dist.barrier(group=ep_group)")


@lie("09c", "block|batch|token", notebook=True)
def a_block_mixes_up_the_tokens_of_its_sequences(text: str) -> str:
    """The experts of a block get its tokens in another order than the one in which it takes their outputs."""
    kept = "return self.experts(x.flatten(0, 1)).view_as(x)"
    return swap(text, kept, "return self.experts(x.transpose(0, 1).flatten(0, 1)).view_as(x)")


@lie("09c", "checkpoint|expert", notebook=True)
def experts_are_saved_as_copies_of_one_tensor(text: str) -> str:
    """The experts of a rank go into the checkpoint as they are, and not as parts of one DTensor."""
    return swap(text, "return DTensor.from_local(experts, mesh, [Shard(0)])", "return experts")


@lie("09c", "checkpoint|expert", module="torch.distributed.checkpoint")
def a_checkpoint_keeps_the_tensors_of_the_ranks_apart(module: Any) -> None:
    """A distributed checkpoint has a tensor of each rank under the same name, and gives it back to that rank."""

    def by_rank(tensors: dict) -> dict:
        rank = module.state_dict_saver.dist.get_rank()
        renamed = {}
        for name, tensor in tensors.items():
            is_dtensor = hasattr(tensor, "to_local")
            if is_dtensor:
                renamed[name] = tensor
            else:
                renamed[f"{name} of rank {rank}"] = tensor
        return renamed

    @instead_of(module, "save")
    def save(original: Any, state_dict: dict, **keywords: Any) -> Any:
        return original(by_rank(state_dict), **keywords)

    @instead_of(module, "load")
    def load(original: Any, state_dict: dict, **keywords: Any) -> None:
        original(by_rank(state_dict), **keywords)  # into the same tensors


@lie("09c", "norm|expert", notebook=True)
def saved_experts_are_copies(text: str) -> str:
    """The DTensors of the experts say that the ranks along `ep` have copies, and not parts, of them."""
    return swap(text, "from_local(mine, ep_mesh, [Shard(0)])", "from_local(mine, ep_mesh)")


@lie("09c", "divisor|FSDP", module=FSDP)
def fsdp_keeps_its_own_divisor(module: Any) -> None:
    """`set_gradient_divide_factor` changes nothing, so FSDP divides by the size of its mesh."""
    replace(module.FSDPModule, "set_gradient_divide_factor", nothing)
