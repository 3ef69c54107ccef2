"""Lies (planted faults) about profiling, debugging, and what NCCL says."""

from typing import Any

from sabotage.lies.telling_lies import C10D, build_with, instead_of, lie, replace, swap

# --- Profiling and debugging


@lie("14", "all.?reduce|collective|communication", module="torch.profiler.profiler")
def profiler_loses_collectives(module: Any) -> None:
    """The profiler's trace has no collectives."""

    @instead_of(module._KinetoProfile, "export_chrome_trace")
    def export_chrome_trace(original: Any, self: Any, path: Any, *inputs: Any, **keywords: Any) -> Any:
        import json
        from pathlib import Path

        original(self, path, *inputs, **keywords)
        file = Path(path)
        trace = json.loads(file.read_text())
        kept_events = []
        for event in trace["traceEvents"]:
            is_collective = event.get("name", "").startswith("gloo:")  # such as "gloo:all_reduce"
            if not is_collective:
                kept_events.append(event)
        trace["traceEvents"] = kept_events
        file.write_text(json.dumps(trace))


@lie("14", "flight recorder|record", module=C10D)
def flight_recorder_loses_the_last_call(c10d: Any) -> None:
    """The flight recorder's dump lacks the collective that hangs."""
    import pickle

    from torch._C import _distributed_c10d

    library: Any = _distributed_c10d

    @instead_of(library, "_dump_fr_trace")
    def dump(original: Any, *inputs: Any) -> Any:
        recorded = pickle.loads(original(*inputs))
        recorded["entries"] = recorded["entries"][:-1]
        return pickle.dumps(recorded)


@lie("14", "culprit|flight recorder|torchfrtrace|reader", module="torch.distributed.flight_recorder.components.types")
def flight_recorder_blames_the_wrong_rank(module: Any) -> None:
    """The flight recorder's reader names the other rank."""

    @instead_of(module.EntryState, "log")
    def log(original: Any, self: Any, *inputs: Any, errors: Any = None, **keywords: Any) -> Any:
        # Pairs of a rank and its error. Of two ranks, 1 - rank is the other one.
        if errors:
            errors = {(1 - rank, error) for rank, error in errors}
        original(self, *inputs, errors=errors, **keywords)


@lie("14", "anomaly", module="torch.autograd.anomaly_mode")
def detect_anomaly_sees_nothing(module: Any) -> None:
    """`detect_anomaly` lets a gradient pass that is not a number."""
    original = module.detect_anomaly.__init__
    replace(module.detect_anomaly, "__init__", lambda self, check_nan=True: original(self, check_nan=False))


@lie("14", "checksum|replicas|drift", module=C10D)
def replicas_compare_with_themselves(c10d: Any) -> None:
    """`all_gather` gives a rank its own tensor for everybody's."""

    def all_gather(tensors: Any, tensor: Any, *inputs: Any, **keywords: Any) -> Any:
        for part in tensors:
            part.copy_(tensor)

    replace(c10d, "all_gather", all_gather)


@lie("14", "fused|sync", module="torch.optim.sgd")
def fused_sgd_is_not_fused(module: Any) -> None:
    """SGD with `fused=True` updates its tensors one by one."""
    build_with(module.SGD, fused=False)


@lie("14", "slow|straggler|wait", notebook=True)
def waiting_counts_as_work(text: str) -> str:
    """The table of ranks counts the waiting for a slow rank as a rank's own time."""
    return swap(text, r"\"own\": (whole - waited) / steps", r"\"own\": whole / steps")


@lie("14", "hook|NaN|output", notebook=True)
def hooks_pass_over_dictionaries(text: str) -> str:
    """The hooks that look for a NaN do not look into a module's dictionary."""
    return swap(text, "if isinstance(value, dict):", "if False:")


@lie("14", "together|skip|differ", notebook=True)
def together_means_everybody(text: str) -> str:
    """A batch is skipped only if it is an outlier on all ranks, so that nobody ever skips."""
    return swap(
        text, "dist.all_reduce(outlier, op=dist.ReduceOp.MAX)", "dist.all_reduce(outlier, op=dist.ReduceOp.MIN)"
    )


@lie("14", "HSDP|replica|drift", notebook=True)
def shards_of_a_mesh_are_compared(text: str) -> str:
    """Of a mesh, ranks are compared that hold different shards, and not the replicas."""
    return swap(text, r"mesh[\"replicate\"].get_group()", r"mesh[\"shard\"].get_group()")


@lie("14", "stand|stack", notebook=True)
def the_commonest_stack_comes_first(text: str) -> str:
    """Of all ranks' stacks, those that are equal come first, and the one that differs last."""
    return swap(text, "key=lambda item: len(item[1])", "key=lambda item: -len(item[1])")


@lie("14", "merge|lane|rank", notebook=True)
def lanes_of_a_merged_trace_lose_their_names(text: str) -> str:
    """In the merged trace a rank's CPU and its GPU have the same name."""
    return swap(text, "{lanes.get(pid, '')}", "")


# --- What NCCL and the watchdog say


@lie("14b", "transport|way|via", notebook=True)
def a_transport_is_read_without_its_gpu_direct(text: str) -> str:
    """The reader of NCCL's log stops at the adapter, so that `GDRDMA` and its absence look alike."""
    return swap(text, r"via (\\S+)", r"via (\\w+/\\w+)")


@lie("14b", "GDRDMA|adapter|advice", notebook=True)
def gpu_direct_is_blamed_too(text: str) -> str:
    """The advice on NCCL's log blames connections with `GDRDMA` as well."""
    return swap(text, r"(?!\\S*GDRDMA)", "", times=2)


@lie("14b", "smallest|not called|last enqueued", notebook=True)
def who_called_most_is_behind(text: str) -> str:
    """Of the watchdog's messages, the ranks that have called more are named as those that lag behind."""
    return swap(text, "if number < first}", "if number > first}")


@lie("14b", "smallest|not called|last enqueued", notebook=True)
def every_group_counts(text: str) -> str:
    """Of the watchdog's messages, those of every group count, and not of the group that is asked for."""
    return swap(text, "if group in groups[rank, number]:", "if True:")


@lie("14b", "smallest|not called|last enqueued", notebook=True)
def ranks_wait_in_the_newest_call(text: str) -> str:
    """Of the calls that timed out, the one with the largest number is taken for the one in which all wait."""
    return swap(text, "first = min(number for", "first = max(number for")


@lie("14b", "[Ss]ends|numbers", notebook=True)
def sends_and_receives_are_compared(text: str) -> str:
    """The numbers of a pipeline's sends and receives are compared, as if all ranks made the same calls."""
    return swap(text, "if operations & {", "if not {")


@lie("14b", "P2P|NVLink|advice", notebook=True)
def broken_nvlink_is_called_ordinary(text: str) -> str:
    """NCCL's warning that GPUs joined by NVLink cannot copy gets the advice on cards that never could."""
    return swap(text, r"disabled between connected\": \"the", r"disabled between\": \"the")


@lie("14b", "missing|timed out|Operation timed out", notebook=True)
def every_group_is_silent(text: str) -> str:
    """Of the lines of 2.15's `nccl`, those of every group count, so that a missing rank seems to have waited."""
    return swap(text, "if of_group == group:", "if True:")


@lie("14b", "cannot read|refuse", notebook=True)
def what_cannot_be_read_is_explained(text: str) -> str:
    """Lines in a form that nobody knows are explained as if no rank had timed out."""
    return swap(text, "if group not in old | new:", "if False:")


@lie("14b", "cannot read|refuse", notebook=True)
def a_line_that_is_cut_off_does_not_count(text: str) -> str:
    """A timeout's line that cannot be read whole is passed over, among others that can."""
    return swap(text, "if call is None or call.group(1, 2) not in groups:", "if False:")


@lie("14b", "count|RAS", notebook=True)
def ras_names_who_is_ahead(text: str) -> str:
    """In NCCL's RAS report, the ranks that have launched the most collectives are named as late."""
    return swap(text, "if count[kind] < most:", "if count[kind] == most:")


@lie("14b", "missing|answer|RAS", notebook=True)
def ras_overlooks_the_dead(text: str) -> str:
    """Of NCCL's RAS report, only ranks that answer are read, so that a dead one is not named."""
    return swap(text, r"comm.get(\"missing_ranks\", [])", "[]")


@lie("14b", "stack|stands|server", module="torch.distributed.debug._frontend")
def the_debug_server_shows_rank_0_for_all(module: Any) -> None:
    """PyTorch's debug server shows rank 0's answer for every rank's."""

    @instead_of(module, "fetch_all")
    def fetch_all(original: Any, *inputs: Any, **keywords: Any) -> Any:
        addresses, answers = original(*inputs, **keywords)
        return addresses, answers[:1] * len(answers)


# --- Silent mistakes


@lie("14c", "sampler|batch", module="helpers.training_check")
def ranks_on_the_same_samples_pass(module: Any) -> None:
    """The check for silent mistakes does not compare the samples on which ranks train."""
    other_rules = [rule for rule in module.RULES if rule is not module.find_same_samples]
    module.RULES = tuple(other_rules)


@lie("14c", "start|first weights|equal", module="helpers.training_check")
def equal_weights_at_the_start_are_accused(module: Any) -> None:
    """The check for silent mistakes takes replicas that begin with equal weights for different ones."""

    @instead_of(module, "initial_weights")
    def initial_weights(original: Any, record: Any) -> Any:
        checksums = original(record)  # {name of a parameter: checksum}, the same on all ranks
        return {name: checksum + record.rank for name, checksum in checksums.items()}


@lie("14c", "dropout|noise", module="helpers.training_check")
def every_dropout_is_the_same(module: Any) -> None:
    """The check for silent mistakes takes the masks of all ranks' dropouts for equal ones."""

    @instead_of(module, "random_state")
    def random_state(original: Any, device: Any) -> int:
        return 0


@lie("14c", "workers|augmentation", module="helpers.training_check")
def what_workers_draw_is_not_seen(module: Any) -> None:
    """The check for silent mistakes takes it that a loader's workers draw no random numbers."""

    @instead_of(module.LoaderObserver, "draws_in_worker")
    def draws_in_worker(original: Any, observer: Any, epoch: Any) -> int:
        return 0
