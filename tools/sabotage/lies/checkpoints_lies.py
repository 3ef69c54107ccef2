"""Lies (planted faults) about checkpoints."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

from sabotage.lies.telling_lies import CHECKPOINT, SCALER, call_with, instead_of, lie, nothing, replace, swap

# --- Checkpoints


@lie("10", "HSDP|write|slice", module="torch.distributed.checkpoint.default_planner")
def the_lowest_rank_writes_every_copy(module: Any) -> None:
    """Of the ranks that hold a slice, the lowest one writes it, however much that rank has to write already."""
    original = module.dedup_save_plans
    replace(module, "dedup_save_plans", lambda plans, _: original(plans, True))


@lie("10 old_code", "load|resume|same bits", module="torch.distributed.checkpoint.state_dict_loader")
def dcp_load_loads_nothing(module: Any) -> None:
    """`dcp.load` returns, and the tensors hold what they held."""
    replace(module, "load", nothing)


@lie("10 11", "optimizer|momentum|same bits|every bit", module="torch.optim.optimizer")
def optimizer_is_not_restored(module: Any) -> None:
    """A checkpoint without the optimizer: a resume begins with fresh momenta."""
    replace(module.Optimizer, "load_state_dict", nothing)


@lie("10b", "scaler", module=SCALER)
def scaler_is_not_restored(module: Any) -> None:
    """A checkpoint without the gradient scaler: a resume begins with a scale of 65,536."""
    replace(module.GradScaler, "load_state_dict", nothing)


@lie("10", "random|same bits", module="torch.random")
def generator_is_not_restored(module: Any) -> None:
    """A checkpoint without the random numbers: `set_rng_state` does nothing."""
    replace(module, "set_rng_state", nothing)


@lie("10", "schedule|learning rate", module="torch.optim.lr_scheduler")
def schedule_starts_again(module: Any) -> None:
    """A checkpoint without the schedule: after a resume the learning rate starts again."""
    replace(module.LRScheduler, "load_state_dict", nothing)


@lie("10b", "async_save|thread", module="torch.distributed.checkpoint.state_dict_saver")
def async_save_copies_nothing(module: Any) -> None:
    """`dcp.async_save` does not copy: its thread waits a little, and writes what training has changed."""

    # async_save first calls the stager, which copies the tensors of ``state``, and then writes the copies in a thread.
    def stage_without_a_copy(self: Any, state: Any, **keywords: Any) -> Any:
        return state

    replace(module.DefaultStager, "stage", stage_without_a_copy)

    # The file of a small model would be written before the next step changes its tensors. So the write is delayed.
    @instead_of(module._ThreadBasedAsyncCheckpointExecutor, "execute_save")
    def execute_save(original: Any, self: Any, *inputs: Any, **keywords: Any) -> Any:
        from concurrent.futures import ThreadPoolExecutor
        from time import sleep

        def save_later() -> Any:
            sleep(1)  # second
            future = original(self, *inputs, **keywords)
            return future.result()

        return ThreadPoolExecutor(max_workers=1).submit(save_later)


@lie("10", "kill|folder|resume", notebook=True)
def a_killed_save_leaves_its_folder(text: str) -> str:
    """A save does not remove the folder that a killed save of the same step has left."""
    return swap(text, "shutil.rmtree(temporary, ignore_errors=True)", "pass")


@lie("10", "half|killed|damage|whole", module=CHECKPOINT)
def half_a_file_counts(module: Any) -> None:
    """A torn write: half of a file is written, and it counts as saved."""

    @instead_of(module, "save_file")
    def save_file(original: Any, state: Any, path: Any) -> None:
        original(state, path)
        os.truncate(path, os.stat(path).st_size // 2)


@lie("10", "fail|disk|raise|finish", module=CHECKPOINT)
def failed_save_counts(module: Any) -> None:
    """A checkpoint counts though one rank could not write its part."""

    @instead_of(module, "put_in_place")
    def put_in_place(original: Any, path: Any, failures: Any, written: Any, keep: int) -> None:
        original(path, [None for _ in failures], written, keep)


@lie("10", "newest|keep|last", module=CHECKPOINT)
def retention_deletes_the_newest(module: Any) -> None:
    """Of more than `keep` checkpoints the newest are deleted."""

    @instead_of(module, "put_in_place")
    def put_in_place(original: Any, path: Any, failures: Any, written: Any, keep: int) -> None:
        original(path, failures, written, 1_000_000)
        for newer in module.finished(path.parent)[keep:]:
            module.remove(newer)


@lie("10", "flip|checksum|bit", module=CHECKPOINT)
def digests_are_not_compared(module: Any) -> None:
    """`verify` accepts any bytes of the right length."""

    def digest_in_the_manifest(path: Any) -> str:
        manifest = json.loads((path.parent / module.MANIFEST).read_bytes())
        return manifest[path.name][1]

    replace(module, "sha256", digest_in_the_manifest)


@lie("10", "rank 0|newest", module=CHECKPOINT)
def each_rank_resumes_from_its_own_newest(module: Any) -> None:
    """`latest_good` says on each rank the newest checkpoint that this rank sees, not the one that rank 0 sees."""
    replace(module, "latest_good", lambda folder: module.find_latest_good(Path(folder)))


@lie("10", "truncat|length|gone|damage", module=CHECKPOINT)
def damaged_checkpoint_is_taken(module: Any) -> None:
    """`latest_good` takes the newest checkpoint, damaged or not."""
    replace(module, "find_latest_good", lambda folder: module.finished(folder)[-1])


@lie("10b", "execut|weights_only|hostile|program", module=CHECKPOINT)
def load_file_executes_what_it_reads(module: Any) -> None:
    """`load_file` loads with `weights_only=False`, and so executes what a file says."""

    @instead_of(module, "load_file")
    def load_file(original: Any, path: Any) -> Any:
        load = module.torch.load
        with mock.patch.object(module.torch, "load", lambda *inputs, **options: load(path, weights_only=False)):
            return original(path)


@lie("10", "copy|background|start of the save", module=CHECKPOINT)
def background_save_copies_nothing(module: Any) -> None:
    """A save in the background writes tensors that training goes on to change."""

    class NoCopies:
        def stage(self, state: Any) -> Any:
            return state

    replace(module, "BlockingAsyncStager", NoCopies)


@lie("10", "sync|disk", module=CHECKPOINT)
def a_file_is_renamed_before_it_is_on_the_disk(module: Any) -> None:
    """A checkpoint's file is renamed without a wait for the disk."""

    @instead_of(module.HashedFile, "close")
    def close(original: Any, file: Any) -> None:
        with mock.patch("os.fsync", nothing):
            original(file)


@lie("10", "random|same bits", notebook=True)
def all_ranks_get_the_generators_of_rank_0(text: str) -> str:
    """A resume gives all ranks the random states of rank 0 in Python and NumPy."""
    states, mine = '[\\"random\\"]', "[dist.get_rank()]"
    mixed = f'{{**plain{states}[0], \\"cpu\\": plain{states}{mine}[\\"cpu\\"]}}'
    return swap(text, f"set_random_state(plain{states}{mine}", f"set_random_state({mixed}")


@lie("10", "kill|whole|beside", notebook=True)
def by_hand_the_old_file_is_overwritten(text: str) -> str:
    """The chapter's own save writes onto the old file, and not beside it."""
    return swap(text, r"part = path.with_suffix(\".part\")", "part = path")


@lie("10", "folder|killed|all have written", notebook=True)
def by_hand_the_folder_does_not_wait_for_all_ranks(text: str) -> str:
    """The chapter's own folder gets its name as soon as rank 0 has written, though other ranks have not."""
    return swap(text, "dist.barrier()  # all ranks have written", "pass")


@lie("10", "How big|disk|many", notebook=True)
def no_room_for_the_save_that_runs(text: str) -> str:
    """The disk needs room for the checkpoints that are kept, and for no other."""
    return swap(text, "size * (keep + 1)", "size * keep")


@lie("10", "piece|forget", notebook=True)
def the_scheduler_is_forgotten_with_the_optimizer(text: str) -> str:
    """Where the scheduler alone should be forgotten, the optimizer is."""
    piece = '(\\"optimizer\\" if piece == \\"scheduler\\" else piece)'
    old = "getattr(run, piece).load_state_dict(fresh[piece])"
    return swap(text, old, f"getattr(run, {piece}).load_state_dict(fresh[{piece}])")


# --- Checkpoints in real projects

SAVED = "torch.distributed.checkpoint.state_dict"


@lie("10b", "frozen|freeze", module=SAVED)
def frozen_parameters_keep_their_state(module: Any) -> None:
    """A load restores the optimizer's state of frozen parameters too."""

    # get_state_dict and set_state_dict leave out each parameter whose requires_grad is False. With this bug, no
    # parameter is frozen while one of them runs, so they save and load the state of all parameters.
    def call_with_nothing_frozen(original: Any, model: Any, *inputs: Any, **keywords: Any) -> Any:
        frozen_parameters = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        for parameter in frozen_parameters:
            parameter.requires_grad_(True)
        result = original(model, *inputs, **keywords)
        for parameter in frozen_parameters:
            parameter.requires_grad_(False)
        return result

    instead_of(module, "get_state_dict")(call_with_nothing_frozen)
    instead_of(module, "set_state_dict")(call_with_nothing_frozen)


@lie("10b", "float|flatten", module=SAVED)
def the_flattened_form_names_what_is_missing(module: Any) -> None:
    """With `flatten_optimizer_state_dict=True` the error names the parameter whose state is missing."""

    @instead_of(module, "_unflatten_optim_state_dict")
    def unflatten(original: Any, optim: Any, state: Any, info: Any) -> Any:
        for names in info.fqn_param_mapping.values():
            if not isinstance(names, set):
                continue
            for name in names:
                has_state = any(key.startswith(f"state.{name}.") for key in state)
                if not has_state:
                    raise RuntimeError(f"Missing optimizer state for parameter '{name}' in checkpoint.")
        return original(optim, state, info)


@lie("10b", "exactly|state", notebook=True)
def load_exactly_keeps_the_state_that_torch_made(text: str) -> str:
    """`load_exactly` keeps the optimizer's state of the zero step where the file has none."""
    return swap(text, "optimizer.state.pop(parameter, None)", "pass")


@lie("10b", "alone|another|exactly|model", notebook=True)
def load_exactly_takes_another_model(text: str) -> str:
    """`load_exactly` loads a checkpoint into a model that has other weights."""
    return swap(text, "if in_model != in_file:", "if False:")


@lie("10b", "safetensors|slices", module="torch.distributed.checkpoint.hf_storage")
def safetensors_are_not_read(module: Any) -> None:
    """`HuggingFaceStorageReader` reads nothing: the tensors hold what they held."""
    replace(module.HuggingFaceStorageReader, "_process_read_request", nothing)


@lie("10b", "joins|joined", module="torch.distributed.checkpoint.hf_storage")
def slices_are_not_joined(module: Any) -> None:
    """`HuggingFaceStorageWriter` ignores `enable_consolidation`."""
    replace(module, "consolidate_safetensors_files", nothing)


@lie("10b", "memory|copies", module="torch.distributed.checkpoint.staging")
def copies_of_async_saves_are_kept(module: Any) -> None:
    """`dcp.async_save` keeps its copy of the tensors after the save."""
    kept = []

    @instead_of(module.BlockingAsyncStager, "stage")  # which a FileSystemWriter is
    def stage(original: Any, *inputs: Any, **keywords: Any) -> Any:
        kept.append(original(*inputs, **keywords))
        return kept[-1]


@lie("10b", "prefix|_orig_mod", module="torch.distributed.checkpoint.state_dict")
def names_keep_the_compilers_prefix(module: Any) -> None:
    """`get_model_state_dict` leaves `_orig_mod.` in the names."""
    call_with(module, "_get_fqns", skip_compiler_prefix=False)
