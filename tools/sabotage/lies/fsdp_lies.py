"""Lies (planted faults) about fully sharded data parallel."""

from typing import Any

from sabotage.lies.telling_lies import (
    FSDP,
    build_with,
    call_with,
    instead_of,
    lie,
    nothing,
    replace,
    shard_with,
    swap,
)

# --- Fully sharded data parallel


@lie("06", "by hand|mean", notebook=True)
def slices_by_hand_are_summed_not_averaged(text: str) -> str:
    """FSDP by hand adds the gradients up, and does not divide by the number of ranks."""
    return swap(text, "return shard / dist.get_world_size()", "return shard")


@lie("06", "three|shard", notebook=True)
def shards_by_hand_are_not_filled_up(text: str) -> str:
    """FSDP by hand cuts a flat tensor into shards of unequal length."""
    return swap(text, "flat = F.pad(flat, (0, -len(flat) % world_size))", "flat = F.pad(flat, (0, 0))")


@lie("06", "free|alive|whole", notebook=True)
def gathered_weights_by_hand_are_kept(text: str) -> str:
    """FSDP by hand keeps the gathered weights of each block until backward."""
    return swap(text, "!= address:", "!= 0:")


@lie("06", "shard", module=FSDP)
def fully_shard_does_nothing(module: Any) -> None:
    """`fully_shard` returns the module as it was."""
    replace(module, "fully_shard", lambda layer, **_: layer)


@lie("06", "bytes|stor|slice|here|shard", module=FSDP)
def every_rank_stores_everything(module: Any) -> None:
    """`fully_shard` leaves every shard on every rank."""

    def replicated(options: Any) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = options["mesh"]
        if mesh.ndim == 1:
            # Hybrid sharding whose groups of shards have one rank each: all ranks are replicas.
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
    replace(module, "_get_gradient_divide_factors", lambda *inputs, **keywords: (None, None, *operations))


@lie("06", "precision|policy|bfloat16", module=FSDP)
def mixed_precision_policy_is_ignored(module: Any) -> None:
    """`fully_shard` ignores its `MixedPrecisionPolicy`."""
    shard_with(module, lambda options: {"mp_policy": module.MixedPrecisionPolicy()})


@lie("06", "norm|clip", module="torch.nn.utils.clip_grad")
def clipping_takes_the_local_norm(module: Any) -> None:
    """`clip_grad_norm_` takes the norm of the rank's own slices for that of the gradient."""

    @instead_of(module, "_get_total_norm")
    def norm_of_slices(original: Any, tensors: Any, *inputs: Any, **keywords: Any) -> Any:
        from torch.distributed.tensor import DTensor, Replicate

        tensors = list(tensors)  # a generator could be read only once
        if not tensors or not isinstance(tensors[0], DTensor):
            return original(tensors, *inputs, **keywords)
        norm = original([tensor.to_local() for tensor in tensors], *inputs, **keywords)
        # As a replicated tensor, it is taken for the norm on all ranks.
        return DTensor.from_local(norm, tensors[0].device_mesh, [Replicate()])


@lie("06", "recomput|activation", module="torch.utils.checkpoint")
def checkpoint_keeps_all_activations(module: Any) -> None:
    """`torch.utils.checkpoint` keeps the activations, and computes nothing twice."""
    replace(module, "checkpoint", lambda function, *inputs, use_reentrant=None, **_: function(*inputs))


@lie("06", "optimizer|train", notebook=True)
def the_early_optimizer_is_built_late(text: str) -> str:
    """The optimizer that comes before `fully_shard` is built after it."""
    built_late = "shard_blocks(model, mesh), torch.optim.AdamW(model.parameters(), lr=0.01)"
    return swap(text, "return shard_blocks(model, mesh), optimizer", f"return {built_late}")


@lie("06", "peak|block", module="torch.distributed._tools.fsdp2_mem_tracker")
def the_peak_is_what_is_left(module: Any) -> None:
    """`FSDPMemTracker` reports what is alive after the step for the peak."""

    @instead_of(module.FSDPMemTracker, "get_tracker_snapshot")
    def get_tracker_snapshot(original: Any, self: Any, kind: str = "current") -> Any:
        return original(self, "current")


@lie("06", "forward|root|gather", module=FSDP)
def the_root_is_freed_after_forward(module: Any) -> None:
    """`fully_shard` frees the root between forward and backward, too."""
    shard_with(module, lambda options: {"reshard_after_forward": True})


@lie("06", "reshard|root", module=FSDP)
def reshard_frees_nothing(module: Any) -> None:
    """`reshard` leaves a unit gathered."""
    replace(module.FSDPModule, "reshard", nothing)


@lie("06", "ZeRO|sends every new weight", module="torch.distributed.optim.zero_redundancy_optimizer")
def zero_one_sends_no_weights(module: Any) -> None:
    """`ZeroRedundancyOptimizer` does not send the new weights."""
    replace(module.ZeroRedundancyOptimizer, "_sync_params", nothing)


@lie("06", "policy|reduce", module=FSDP)
def gradients_are_reduced_in_the_short_type(module: Any) -> None:
    """`fully_shard` adds gradients up in `param_dtype`, whatever `reduce_dtype` says."""

    def short(options: Any) -> Any:
        kind = getattr(options.get("mp_policy"), "param_dtype", None)
        if kind is None:
            return {}
        return {"mp_policy": module.MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=kind)}

    shard_with(module, short)


@lie("06", "node|replica|hybrid", module=FSDP)
def a_mesh_of_two_dimensions_shards_over_all_ranks(module: Any) -> None:
    """On a mesh of two dimensions `fully_shard` shards over all ranks, and replicates nothing."""

    def flat(options: Any) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        if options["mesh"].ndim == 1:
            return {}
        return {"mesh": init_device_mesh("cpu", (options["mesh"].size(),))}

    shard_with(module, flat)


@lie("06", "weights|initialize|seed", notebook=True)
def each_rank_initializes_other_weights(text: str) -> str:
    """The script's ranks initialize their blocks with a seed for each rank."""
    return swap(text, "torch.manual_seed(seed)  # the same", "torch.manual_seed(seed + dist.get_rank())  # the same")


@lie("06", "load|sends", module="torch.distributed.checkpoint.state_dict")
def a_sharded_model_loads_nothing(module: Any) -> None:
    """`set_model_state_dict` leaves the weights as they were."""
    replace(module, "set_model_state_dict", nothing)


@lie("06", "batch|forward", notebook=True)
def each_rank_counts_its_own_batches(text: str) -> str:
    """The script's `evaluate` cuts each rank's share into as many batches as the rank itself needs."""
    return swap(text, "max(1, len(dataset) // batch_size)", "max(1, -(-len(images) // batch_size))")


@lie("06", "prefetch|ahead|started", module="torch.distributed.fsdp._fully_shard._fsdp_param_group")
def no_block_is_gathered_ahead(module: Any) -> None:
    """In backward, FSDP gathers a block when it is needed, and not while the block before it computes."""
    replace(module.FSDPParamGroup, "_backward_prefetch", nothing)


@lie("06", "stops|price|recomput", module="torch.utils.checkpoint")
def recomputing_runs_to_the_end(module: Any) -> None:
    """The second forward of a block that recomputes always runs to the end."""
    call_with(module, "checkpoint", early_stop=False)


@lie("06", "compiles nothing|compile", notebook=True)
def the_recomputing_forward_is_a_function_of_ours(text: str) -> str:
    """`block.compile()` traces a block whose `forward` is PyTorch's `checkpoint`."""
    return swap(
        text,
        "block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)",
        "block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)",
    )


@lie("06", "fullgraph", notebook=True)
def a_whole_graph_may_be_missing(text: str) -> str:
    """With `fullgraph=True` a block that compiles nothing raises no error."""
    return swap(text, 'block.compile(backend=\\"eager\\", fullgraph=True)', 'block.compile(backend=\\"eager\\")')


@lie("06", "rows|different|seed", notebook=True)
def each_rank_has_a_seed_for_its_shards(text: str) -> str:
    """Ranks that initialize their shards have different random numbers."""
    return swap(
        text,
        'init_weights(blocks, \\"cpu\\")  # to_empty',
        'torch.manual_seed(dist.get_rank()); init_weights(blocks, \\"cpu\\")  # to_empty',
    )


@lie("decision_guide", "compil", notebook=True)
def checkpoint_itself_can_be_compiled(text: str) -> str:
    """`block.compile()` compiles a block whose `forward` is PyTorch's `checkpoint`."""
    return swap(
        text,
        "block.forward = partial(checkpoint, block.forward, use_reentrant=False)",
        "block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)",
    )


# --- FSDP2 in a real project


@lie("06b", "accumul|reduce", module=FSDP)
def gradient_sync_cannot_be_held_back(module: Any) -> None:
    """`set_requires_gradient_sync(False)` reduces the gradients all the same."""
    replace(module.FSDPModule, "set_requires_gradient_sync", nothing)


@lie("06b", "tie|shared", module="torch.distributed.fsdp._fully_shard._fsdp_state")
def a_parameter_may_be_in_two_groups(module: Any) -> None:
    """FSDP does not look whether two groups share a parameter."""
    replace(module.FSDPState, "_validate_no_duplicate_params", nothing)


@lie("06b", "unused|branch|group", module=FSDP)
def unused_parameters_are_left_out(module: Any) -> None:
    """`set_reduce_scatter_unused_params` changes nothing."""
    replace(module.FSDPModule, "set_reduce_scatter_unused_params", nothing)


@lie("06b", "regist|method", module=FSDP)
def no_method_can_be_registered(module: Any) -> None:
    """`register_fsdp_forward_method` changes nothing."""
    replace(module, "register_fsdp_forward_method", nothing)


@lie("06b", "divi|token", module=FSDP)
def the_divide_factor_is_ignored(module: Any) -> None:
    """`set_gradient_divide_factor` changes nothing."""
    replace(module.FSDPModule, "set_gradient_divide_factor", nothing)


@lie("06b", "all-reduce|node", module=FSDP)
def each_micro_batch_is_reduced_between_nodes(module: Any) -> None:
    """`set_requires_all_reduce(False)` reduces between replicas all the same."""
    replace(module.FSDPModule, "set_requires_all_reduce", nothing)


@lie("06b", "Muon|matri", module="torch.optim._muon")
def muon_iterates_four_times(module: Any) -> None:
    """Muon multiplies its momentum four times, not five."""
    build_with(module.Muon, ns_steps=4)


@lie("06b", "recomput|keep|kept", module="torch.utils.checkpoint")
def the_policy_of_a_checkpoint_is_ignored(module: Any) -> None:
    """`create_selective_checkpoint_contexts` ignores its policy, and all is computed again."""
    replace(module, "create_selective_checkpoint_contexts", lambda *inputs, **keywords: module.noop_context_fn())


@lie("06b", "token|text", notebook=True)
def ranks_do_not_ask_before_a_token(text: str) -> str:
    """A rank whose text is done leaves, and does not ask the others."""
    return swap(text, "dist.all_reduce(waiting)  # does any rank want more?", "pass")


@lie("06b", "token", notebook=True)
def the_loss_of_all_tokens_is_not_multiplied(text: str) -> str:
    """The loss that is divided by all tokens is not multiplied by the number of ranks."""
    return swap(text, "square().sum() / total * world_size", "square().sum() / total")


@lie("06b", "dtype", module="torch.distributed.fsdp._fully_shard._fsdp_param_group")
def a_group_may_train_two_dtypes(module: Any) -> None:
    """FSDP does not look whether the trained parameters of a group have one dtype."""

    @instead_of(module.FSDPParamGroup, "_init_mp_dtypes")
    def init(original: Any, self: Any) -> None:
        try:
            original(self)
        except AssertionError:
            self._orig_dtype = self._reduce_dtype = None


@lie("06b", "nan|norm", module="torch.nn.utils.clip_grad")
def a_norm_of_nan_is_accepted(module: Any) -> None:
    """`clip_grad_norm_` ignores `error_if_nonfinite`."""

    @instead_of(module, "_get_total_norm")
    def norm(original: Any, gradients: Any, norm_type: Any = 2.0, strict: Any = False, foreach: Any = None) -> Any:
        return original(gradients, norm_type, False, foreach)


@lie("06b", "optimizer|forward", module=FSDP)
def a_forward_leaves_nothing_gathered(module: Any) -> None:
    """`fully_shard` frees the root after a forward, so that an optimizer that is built then has the shards."""
    shard_with(module, lambda options: {"reshard_after_forward": True})


@lie("06b", "one rank|mesh", module=FSDP)
def a_mesh_of_one_rank_is_that_of_all(module: Any) -> None:
    """`fully_shard` takes a mesh of all ranks in place of a mesh of one rank."""

    def all_ranks(options: Any) -> Any:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if options["mesh"].size() > 1:
            return {}
        return {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}

    shard_with(module, all_ranks)


@lie("06b", "checkpoint|name", module="torch.distributed.checkpoint")
def a_checkpoint_loads_only_whole(module: Any) -> None:
    """`dcp.load` raises an error if the checkpoint has names that it was not asked for."""

    @instead_of(module, "load")
    def load(original: Any, state: Any, *inputs: Any, checkpoint_id: Any = None, **keywords: Any) -> Any:
        names = module.FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
        if set(names) - set(state):
            raise ValueError("names are left over")
        return original(state, *inputs, checkpoint_id=checkpoint_id, **keywords)


@lie("06b", "base|frozen|LoRA", module="torch.distributed.fsdp._fully_shard._fsdp_param_group")
def a_frozen_base_is_cast_to_float32(module: Any) -> None:
    """FSDP stores what is frozen in float32."""

    @instead_of(module.FSDPParamGroup, "__init__")
    def init(original: Any, self: Any, params: Any, *inputs: Any, **keywords: Any) -> None:
        import torch

        for parameter in params:
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(torch.float32)
        original(self, params, *inputs, **keywords)


@lie("06b", "Muon|matri|decay", notebook=True)
def muon_on_shards_has_no_weight_decay(text: str) -> str:
    """`MuonOnShards` leaves out the weight decay."""
    return swap(text, '1 - lr * group[\\"weight_decay\\"]', "1")


@lie("06b", "recomput|keep|kept", notebook=True)
def a_policy_that_keeps_everything(text: str) -> str:
    """The policy of selective checkpointing keeps the results of all operations."""
    return swap(text, "RECOMPUTE = CheckpointPolicy.PREFER_RECOMPUTE", "RECOMPUTE = CheckpointPolicy.MUST_SAVE")


@lie("06b", "gloo|force|sum", notebook=True)
def gloo_divides_without_being_forced(text: str) -> str:
    """On gloo a divide factor needs no forced sum."""
    return swap(text, "set_force_sum_reduction_for_comms(force_sum)", "set_force_sum_reduction_for_comms(True)")


@lie("06b", "address|storage", module=FSDP)
def gathered_weights_move(module: Any) -> None:
    """`set_keep_unsharded_storage` changes nothing."""
    if hasattr(module.FSDPModule, "set_keep_unsharded_storage"):  # since PyTorch 2.15
        replace(module.FSDPModule, "set_keep_unsharded_storage", nothing)


@lie("06b", "reduced|handle|wait", module=FSDP)
def backward_ends_without_its_sums(module: Any) -> None:
    """`finalize_backward` reduces nothing."""

    class Handle:
        def wait(self) -> None:
            pass

    if hasattr(module.FSDPModule, "finalize_backward"):  # since PyTorch 2.15
        replace(module.FSDPModule, "finalize_backward", lambda *_, **__: Handle())
