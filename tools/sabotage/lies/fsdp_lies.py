"""Lies (planted faults) about fully sharded data parallel."""

from typing import Any

from sabotage.lies.telling_lies import FSDP, build_with, instead_of, lie, nothing, replace, shard_with, swap

# --- Fully sharded data parallel


@lie("06", "shard", module=FSDP)
def fully_shard_does_nothing(module: Any) -> None:
    """`fully_shard` returns the module as it was."""
    replace(module, "fully_shard", lambda layer, **_: layer)


@lie("06", "bytes|stor|slice|here", module=FSDP)
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


@lie("06", "accumul|reduce", module=FSDP)
def gradient_sync_cannot_be_held_back(module: Any) -> None:
    """`set_requires_gradient_sync(False)` reduces the gradients all the same."""
    replace(module.FSDPModule, "set_requires_gradient_sync", nothing)


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
    return swap(text, "    if optimizer_first:\\n", "    if False:\\n")


@lie("06", "peak|block", module="torch.distributed._tools.fsdp2_mem_tracker")
def the_peak_is_what_is_left(module: Any) -> None:
    """`FSDPMemTracker` reports what is alive after the step for the peak."""

    @instead_of(module.FSDPMemTracker, "get_tracker_snapshot")
    def get_tracker_snapshot(original: Any, self: Any, kind: str = "current") -> Any:
        return original(self, "current")


# --- FSDP2 in a real project


@lie("06b", "equal|bit", notebook=True)
def slices_by_hand_are_summed_not_averaged(text: str) -> str:
    """FSDP by hand adds the gradients up, and does not divide by the number of ranks."""
    return swap(text, "return mine / dist.get_world_size()", "return mine")


@lie("06b", "free|alive|whole", notebook=True)
def gathered_weights_by_hand_are_kept(text: str) -> str:
    """FSDP by hand keeps the gathered weights of each block until backward."""
    return swap(text, "!= storage:", "!= 0:")


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
    return swap(text, "dist.all_reduce(going)  # is any rank still going?", "pass")


@lie("06b", "token", notebook=True)
def the_loss_of_all_tokens_is_not_multiplied(text: str) -> str:
    """The loss that is divided by all tokens is not multiplied by the number of ranks."""
    return swap(text, "loss = loss / total * dist.get_world_size()", "loss = loss / total")


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
