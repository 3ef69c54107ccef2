"""Lies (planted faults) about trainers, restarts and nodes."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

from sabotage.lies.telling_lies import (
    AGENT,
    C10D,
    CHECKPOINT,
    STOP_REQUEST,
    give_ranks,
    instead_of,
    lie,
    nothing,
    replace,
    swap,
)

# --- Trainer, restarts, nodes


@lie("11", "dropout|random", notebook=True)
def all_ranks_draw_the_same_noise(text: str) -> str:
    """In a step, all ranks and micro-batches are seeded alike."""
    return swap(text, 'seed_all(\\"step\\", args.seed, step, number)', 'seed_all(\\"step\\", args.seed, step, 0)')


@lie("16", "mesh|share|dp|group", module="torch.distributed.device_mesh")
def a_dimension_of_a_mesh_is_the_world(module: Any) -> None:
    """`DeviceMesh.get_group` gives the group of all ranks, whatever dimension was asked for."""
    replace(module.DeviceMesh, "get_group", lambda *_, **__: module._get_default_group())


@lie("11", "stop|signal|schedul", module=STOP_REQUEST)
def stop_request_hears_nothing(module: Any) -> None:
    """`StopRequest` does not note the signal."""
    replace(module.StopRequest, "note", nothing)


@lie("11 13", "stop|signal|agree", module=STOP_REQUEST)
def one_signalled_rank_is_outvoted(module: Any) -> None:
    """The ranks stop when all of them have got the signal, and not when one has."""
    # A rank that has got the signal brings its number, and the others bring 0. `ask` takes the largest of them.
    all_reduce = module.dist.all_reduce

    def least(tensor: Any, op: Any, **keywords: Any) -> Any:
        return all_reduce(tensor, module.dist.ReduceOp.MIN, **keywords)

    @instead_of(module.StopRequest, "ask")
    def ask(original: Any, self: Any) -> Any:
        with mock.patch.object(module.dist, "all_reduce", least):
            return original(self)


@lie("11", "BatchNorm|broken|finite", notebook=True)
def batchnorm_keeps_a_nan(text: str) -> str:
    """A step that is skipped leaves the running statistics of BatchNorm as the forward left them."""
    return swap(text, "torch.where(is_finite.to(buffer.device), buffer, before)", "buffer")


@lie("11", "stop|every step|skipped", notebook=True)
def skipped_steps_are_not_counted(text: str) -> str:
    """The trainer does not count the steps that it skips in a row."""
    return swap(text, "torch.where(is_finite, 0, self.in_a_row + 1)", "torch.where(is_finite, 0, self.in_a_row)")


@lie("11", "shard|resume", notebook=True)
def each_rank_loads_the_first_shard(text: str) -> str:
    """At a resume each rank that shards the model gets the first part of each weight."""
    return swap(text, "saved = parts[number] if number < len(parts)", "saved = parts[0] if number < len(parts)")


@lie("11", "micro-batch|losses|order", notebook=True)
def each_rank_has_an_order_of_its_own(text: str) -> str:
    """The order of the samples depends on the rank."""
    return swap(text, 'repr((\\"order\\", self.seed, epoch))', 'repr((\\"order\\", self.rank, epoch))')


@lie("11", "TensorBoard|log|curve", notebook=True)
def the_log_has_the_highest_rate(text: str) -> str:
    """The log has the highest learning rate in each line, and not that of its step."""
    old = 'training.optimizer.param_groups[0][\\"lr\\"]'
    return swap(text, old, "training.peak_lrs[0]")


# --- Trainers in real projects


@lie("11b", "run|log", notebook=True)
def every_rank_opens_the_log(text: str) -> str:
    """Every rank opens the log, also where rank 0 alone should."""
    return swap(text, "open_log(folder) if every_rank or rank == 0 else None", "open_log(folder)")


@lie("11b", "warm|compile", notebook=True)
def nothing_is_compiled_before_the_barrier(text: str) -> str:
    """The warm-up runs no forward: each rank compiles in its first step with others."""
    return swap(text, "model(x).sum().backward()  # the bare module: nothing is sent", "pass")


@lie("11b", "timeout|compile", module=C10D)
def a_timeout_cannot_be_lowered(module: Any) -> None:
    """`set_timeout`, before PyTorch 2.14 `_set_pg_timeout`, changes nothing."""
    for name in ("set_timeout", "_set_pg_timeout"):
        if hasattr(module, name):
            replace(module, name, nothing)


@lie("11b", "compile", module="torch.compiler")
def guard_collectives_do_nothing(module: Any) -> None:
    """`torch.compiler.set_enable_guard_collectives` changes nothing."""
    replace(module, "set_enable_guard_collectives", nothing)


@lie("11b", "compile", notebook=True)
def a_forward_is_compiled_in_place(text: str) -> str:
    """`model.compile()` is called in place of the compilation of `model.forward`."""
    # A cell can notice this on PyTorch 2.13 alone, where `model.compile()` compiles nothing for an nn.Sequential.
    return swap(text, "model.forward = torch.compile(model.forward, backend=backend)", "model.compile(backend=backend)")


@lie("11b", "fingerprint|bits", notebook=True)
def all_fingerprints_are_equal(text: str) -> str:
    """A fingerprint depends on a gradient's size only."""
    return swap(text, "hashlib.sha256(data.numpy())", "hashlib.sha256(bytes(len(data)))")


@lie("11b", "first|backward|gradient", notebook=True)
def the_search_begins_at_the_first_layer(text: str) -> str:
    """`first_difference` looks at the first layer first, whose gradient a later layer may have changed."""
    return swap(text, "for name in reversed(mine):", "for name in mine:")


@lie("11b", "collect|garbage|steps", notebook=True)
def garbage_is_collected_at_any_time(text: str) -> str:
    """Ranks that collect garbage together do not switch the usual collections off."""
    return swap(text, '"        gc.disable()\\n"', '"        pass\\n"')


@lie("11b", "wandb|id|run", notebook=True)
def each_start_is_a_run_of_its_own(text: str) -> str:
    """A resumed job does not look for the id of its run in wandb."""
    return swap(text, "if not (is_resumed and id_file.exists()):", "if True:")


@lie("13", "restart|start|checkpoint|going on", notebook=True)
def restart_starts_anew(text: str) -> str:
    """A restarted script finds no checkpoint, and trains from step 0."""
    return swap(text, "    return max(found)", "    return found[0]")


@lie("13", "restart", module=AGENT)
def restarts_are_not_counted(agent: Any) -> None:
    """`torchrun` tells every start that it is the first."""
    give_ranks(agent, lambda env: {"TORCHELASTIC_RESTART_COUNT": "0"})


@lie("13", "restart", module="torch.distributed.launcher.api")
def torchrun_never_restarts(module: Any) -> None:
    """`torchrun` ignores `--max-restarts`."""

    @instead_of(module, "launch_agent")
    def launch_agent(original: Any, config: Any, *inputs: Any, **keywords: Any) -> Any:
        config.max_restarts = 0
        return original(config, *inputs, **keywords)


@lie("13", "status|restart|fail", module="torch.distributed.launcher.api")
def failure_has_status_0(module: Any) -> None:
    """`torchrun` ends with status 0 though a rank has failed."""

    @instead_of(module, "launch_agent")
    def launch_agent(original: Any, *inputs: Any, **keywords: Any) -> Any:
        try:
            return original(*inputs, **keywords)
        except module.ChildFailedError:
            return {}


@lie("13", "restart", module="torch.distributed.launcher.api")
def torchrun_restarts_once_by_default(module: Any) -> None:
    """Without `--max-restarts`, torchrun starts the ranks once more."""

    @instead_of(module, "launch_agent")
    def launch_agent(original: Any, config: Any, *inputs: Any, **keywords: Any) -> Any:
        config.max_restarts = max(config.max_restarts, 1)
        return original(config, *inputs, **keywords)


@lie("13", "record|error file|which rank", module="torch.distributed.elastic.multiprocessing.errors")
def record_writes_no_error_file(module: Any) -> None:
    """`@record` writes no file about the exception."""
    replace(module, "record", lambda function, error_handler=None: function)


@lie("12c", "signal|requeue|batch|Slurm", module="helpers.export.launch_files")
def batch_file_asks_for_no_warning(module: Any) -> None:
    """The batch file does not ask Slurm for a signal before the time is up."""

    @instead_of(module, "launch_files")
    def launch_files(original: Any, *inputs: Any, **keywords: Any) -> Any:
        texts = original(*inputs, **keywords)
        return {name: re.sub(r"(?m)^#SBATCH --signal.*\n", "", text) for name, text in texts.items()}


@lie("12c", "fail|exclude|twice", module="helpers.export.launch_files")
def a_bad_node_comes_back(module: Any) -> None:
    """The batch file never excludes a node, however often this node was the cause of a failure."""

    @instead_of(module, "launch_files")
    def launch_files(original: Any, *inputs: Any, **keywords: Any) -> Any:
        texts = original(*inputs, **keywords)
        return {name: text.replace('"$times" -ge 2', '"$times" -ge 200') for name, text in texts.items()}


def with_functions(texts: dict[str, str], functions: str) -> dict[str, str]:
    """The launch files, with shell functions at the end of the file that the batch file reads."""
    changed = {}
    for name, text in texts.items():
        if name.endswith(".slurm.sh"):
            text += functions
        changed[name] = text
    return changed


@lie("12c", "fail|exclude|progress|hours", module="helpers.export.launch_files")
def progress_excuses_a_bad_node(module: Any) -> None:
    """The batch file excludes a node only if it fails twice at the same checkpoint."""
    # A function that the file calls in place of the command, for the failures of the whole job.
    by_checkpoint = """
cut() {
  if [ "${3-}" ]; then
    failures_at "$(newest_checkpoint)" | command cut -d" " -f2
  else
    command cut "$@"
  fi
}
"""

    @instead_of(module, "launch_files")
    def launch_files(original: Any, *inputs: Any, **keywords: Any) -> Any:
        texts = original(*inputs, **keywords)
        return with_functions(texts, by_checkpoint)


@lie("12c", "network|slow|pairs|every", module="helpers.export.launch_files")
def a_slow_network_excludes_a_node(module: Any) -> None:
    """Of nodes that fail together, the batch file takes one for the cause."""

    @instead_of(module, "launch_files")
    def launch_files(original: Any, *inputs: Any, **keywords: Any) -> Any:
        texts = original(*inputs, **keywords)
        first = "paste() { head -n 1; }\n"  # in place of the command that joins the nodes' names
        return with_functions(texts, first)


@lie("12c", "fail|progress|third|three", module="helpers.export.launch_files")
def a_bug_starts_again_for_ever(module: Any) -> None:
    """The batch file starts a job again after any number of failures without progress."""

    @instead_of(module, "launch_files")
    def launch_files(original: Any, *inputs: Any, **keywords: Any) -> Any:
        texts = original(*inputs, **keywords)
        return {name: text.replace('wc -l)" -ge 3', 'wc -l)" -ge 300') for name, text in texts.items()}


@lie("12c", "progress|checkpoint|step", module="helpers.export.launch_files")
def progress_does_not_count(module: Any) -> None:
    """The batch file gives up after three failures, even if each start got further than the one before."""

    @instead_of(module, "launch_files")
    def launch_files(original: Any, *inputs: Any, **keywords: Any) -> Any:
        texts = original(*inputs, **keywords)
        return {name: text.replace("checkpoint=$(newest_checkpoint)", "checkpoint=any") for name, text in texts.items()}


@lie("12c", "flag|hopeless|gave_up|another start", module="helpers.export.launch_files")
def a_wrong_flag_is_tried_again(module: Any) -> None:
    """The batch file starts a job again whose script says that no start can help."""

    @instead_of(module, "launch_files")
    def launch_files(original: Any, *inputs: Any, **keywords: Any) -> Any:
        texts = original(*inputs, **keywords)
        return {name: text.replace('[ -e "$JOB_FOLDER/gave_up" ]', "false") for name, text in texts.items()}


@lie("12c", "ON_CALL|message|line|person", module="helpers.export.launch_files")
def nobody_is_told(module: Any) -> None:
    """The batch file never calls the command for whoever is on duty."""

    @instead_of(module, "launch_files")
    def launch_files(original: Any, *inputs: Any, **keywords: Any) -> Any:
        texts = original(*inputs, **keywords)
        return {name: text.replace('if [ "$ON_CALL" ]', "if false") for name, text in texts.items()}


@lie("12c", "last words|CUDA|advice", module="helpers.export.launch_files")
def advice_instead_of_an_error(module: Any) -> None:
    """After an error of CUDA, the message about a node has PyTorch's advice in place of the error."""

    @instead_of(module, "launch_files")
    def launch_files(original: Any, *inputs: Any, **keywords: Any) -> Any:
        texts = original(*inputs, **keywords)
        return {name: text.replace("|TORCH_USE_CUDA_DSA", "") for name, text in texts.items()}


@lie("12c", "hang|timeout|blame", module="helpers.export.launch_files")
def in_a_hang_the_healthy_nodes_are_to_blame(module: Any) -> None:
    """The batch file takes a node whose ranks reach a timeout for the cause of a failure."""

    @instead_of(module, "launch_files")
    def launch_files(original: Any, *inputs: Any, **keywords: Any) -> Any:
        texts = original(*inputs, **keywords)
        return {name: text.replace('"$gone|$late|', '"$gone|') for name, text in texts.items()}


@lie("12c", "overwrite|own|copy|functions", module="helpers.export.chapters")
def an_export_replaces_your_script(module: Any) -> None:
    """An export overwrites a script that differs from its own, also without `--force`."""
    replace(module, "refuse_other_text", nothing)


@lie("12", "floor|NVLink|network", notebook=True)
def one_floor_for_all_links(text: str) -> str:
    """The check of a cluster holds the links inside a node to the network's floor."""
    return swap(text, "if speed < node_floor:", "if speed < network_floor // 2:")


@lie("12", "floor|NVLink|NVLS", notebook=True)
def a_floor_refuses_sound_rings(text: str) -> str:
    """The floor for links inside a node is 400, so a sound node whose NCCL runs a ring is refused."""
    return swap(text, r"floors = {\"node_floor\": 300", r"floors = {\"node_floor\": 400")


@lie("12", "fail|node|message", notebook=True)
def a_slow_node_fails_all_nodes(text: str) -> str:
    """When one node is slow inside, the ranks of all broken groups fail, so that no node can be excluded."""
    return swap(text, "to_blame = nodes", "to_blame = broken")


@lie("13", "emergency|node|once", notebook=True)
def every_rank_saves_in_an_emergency(text: str) -> str:
    """Every rank that gets an exception writes an emergency save, not one on each node."""
    return swap(text, "emergency_node{node}.pt", "emergency_node{dist.get_rank()}.pt")


@lie("13", "emergency|claim|start", notebook=True)
def a_claim_outlives_its_start(text: str) -> str:
    """A start leaves the claim of an earlier start where it is, so that it makes no emergency save of its own."""
    return swap(text, "claim.unlink()  # of an earlier start", "pass")


@lie("13", "newest|chose|rank 0", notebook=True)
def each_rank_chooses_its_own_newest(text: str) -> str:
    """Each rank loads the newest checkpoint that it sees itself, not the one that rank 0 has chosen."""
    return swap(text, "dist.broadcast_object_list(newest, group=run.cpu_group)", "newest = [find_newest(folder)]")


@lie("13", "half|whole|step", notebook=True)
def an_emergency_save_is_made_within_a_step(text: str) -> str:
    """An emergency save is made even if the optimizer has changed only a part of the weights."""
    return swap(text, "run.step_is_whole = False", "pass")


@lie("13", "memory|halve", notebook=True)
def a_rank_without_memory_halves_alone(text: str) -> str:
    """Only the rank that has run out of memory halves its micro-batch."""
    return swap(text, "dist.all_reduce(any_failed, op=dist.ReduceOp.MAX, group=run.cpu_group)", "pass")


@lie("13", "memory|micro_batch", notebook=True)
def a_checkpoint_forgets_the_micro_batch(text: str) -> str:
    """A resume begins with the micro-batch of the flags, not with the one that fitted into memory."""
    return swap(text, 'self.micro_batch = state[\\"micro_batch\\"]', "pass")


@lie("13", "interval|save", notebook=True)
def youngs_interval_lacks_its_factor(text: str) -> str:
    """The best time from one save to the next is the root of $C M$, without the 2 of Young's formula."""
    return swap(text, "math.sqrt(2 * cost * between)", "math.sqrt(cost * between)")


@lie("12", "sums|node", notebook=True)
def wrong_sums_of_the_network_are_a_nodes_fault(text: str) -> str:
    """If only the sums between nodes are wrong, the check of a cluster advises to leave out a node."""
    return swap(text, 'advice = \\"Check the nodes in pairs.\\"', 'advice = \\"Leave these nodes out.\\"')


@lie("12", "node|local rank|card", notebook=True)
def the_preflight_tries_first_cards_only(text: str) -> str:
    """The check of a cluster makes no group between nodes but that of their first ranks."""
    return swap(text, "if len(peers) > 1:", "if not peers:")


@lie("12b", "kill|-9", module="torch.distributed.elastic.multiprocessing.errors")
def a_kill_looks_like_an_exit(errors: Any) -> None:
    """`torchrun` reports a killed rank as one that ended with status 1."""

    @instead_of(errors.ProcessFailure, "__post_init__")
    def __post_init__(original: Any, failure: Any) -> None:
        failure.exitcode = 1
        original(failure)


@lie("12b", "port|address", module="torch.distributed.elastic.rendezvous.static_tcp_rendezvous")
def a_taken_port_is_no_error(static: Any) -> None:
    """Static rendezvous takes a free port, whichever port it is given."""

    @instead_of(static.StaticTCPRendezvous, "__init__")
    def __init__(original: Any, self: Any, address: str, port: int, *inputs: Any, **keywords: Any) -> None:
        original(self, address, 0, *inputs, **keywords)


@lie("04b 12b", "timeout|wait", module=C10D)
def groups_have_the_default_timeout(c10d: Any) -> None:
    """`new_group` ignores the timeout that it is given."""

    @instead_of(c10d, "new_group")
    def new_group(original: Any, *inputs: Any, timeout: Any = None, **keywords: Any) -> Any:
        return original(*inputs, **keywords)


@lie("12b", "send|group|order", module=C10D)
def a_broadcast_waits_for_nobody(c10d: Any) -> None:
    """`broadcast` returns at once on the rank that sends."""
    kept = []

    @instead_of(c10d, "broadcast")
    def broadcast(original: Any, tensor: Any, src: Any = None, *inputs: Any, **keywords: Any) -> Any:
        if src != c10d.get_rank():
            return original(tensor, src, *inputs, **keywords)
        kept.append(original(tensor, src, *inputs, **keywords | {"async_op": True}))


@lie("12b", "peer|died|shrink|group", module=C10D)
def shrink_group_is_accepted(c10d: Any) -> None:
    """`shrink_group` gives a group on gloo, too."""
    replace(c10d, "shrink_group", lambda ranks, group=None, *inputs: group)


@lie("12b", "timeout|abort", module=C10D)
def abort_ends_the_call(c10d: Any) -> None:
    """On gloo, aborting a group ends the collectives that wait in it."""

    @instead_of(c10d, "all_reduce")
    def all_reduce(original: Any, tensor: Any, *inputs: Any, group: Any = None, **keywords: Any) -> Any:
        if group is None:
            return original(tensor, *inputs, **keywords)
        raise RuntimeError("The group was aborted.")


@lie("12b", "card|build|code", module="helpers.doctor.facts")
def machine_code_runs_on_newer_cards(module: Any) -> None:
    """Machine code for a GPU runs on every newer one."""

    @instead_of(module, "has_code_for")
    def has_code_for(original: Any, capability: Any, architectures: list[str]) -> bool:
        return original(capability, [name.replace("sm_", "compute_") for name in architectures])


@lie("13", "emergency|save", module=CHECKPOINT)
def an_emergency_save_has_its_name_at_once(module: Any) -> None:
    """An emergency save is written under its final name, not renamed when it is complete."""

    @instead_of(module, "replace_file")
    def replace_file(original: Any, path: Any, write: Any) -> None:
        if "emergency" not in str(path):
            return original(path, write)
        with module.HashedFile(path, path.name) as file:
            write(file)


@lie("06c", "socket", notebook=True)
def groups_of_all_are_one(text: str) -> str:
    """A new group of all ranks is the one that they are in already."""
    return swap(text, "dist.new_group()", "dist.group.WORLD")


@lie("13b", "disk|damaged|save", module="torch.serialization")
def torch_save_keeps_the_old_file(module: Any) -> None:
    """`torch.save` to a path keeps the old file there until the new one is complete."""

    @instead_of(module, "save")
    def save(original: Any, state: Any, path: Any, *inputs: Any, **keywords: Any) -> None:
        if not isinstance(path, Path) or not path.exists():
            return original(state, path, *inputs, **keywords)
        new_file = path.with_suffix(".new")
        original(state, new_file, *inputs, **keywords)
        new_file.replace(path)


@lie("13b", "Xid|drain|reset", notebook=True)
def a_gpu_that_was_reset_is_broken(text: str) -> str:
    """A line with Xid 154 says that a GPU is broken, also the one after its reset, which says that it needs nothing."""
    return swap(text, 'number == \\"154\\" and not text.endswith(\\"(None)\\")', 'number == \\"154\\"')


@lie("13b", "fail|requeue|REQUEUED", notebook=True)
def a_time_limit_is_a_failure(text: str) -> str:
    """Each start that did not complete is a failure, also one whose time was over."""
    return swap(text, 'row[\\"State\\"] == \\"NODE_FAIL\\"', 'row[\\"State\\"] != \\"COMPLETED\\"')


@lie("13b", "spike|NaN", notebook=True)
def nan_is_no_spike(text: str) -> str:
    """The check for a loss spike asks whether the loss is above a limit, which NaN never is."""
    return swap(text, "return not newest <= factor", "return newest > factor")


@lie("13b", "SAVE|switch", notebook=True)
def the_save_switch_stays(text: str) -> str:
    """Nobody removes the file of the save switch."""
    return swap(text, '(folder / \\"SAVE\\").unlink()', "pass")


@lie("13b", "goodput|speed|log", notebook=True)
def a_line_has_the_seconds_of_all_its_steps(text: str) -> str:
    """The log for the alert has the seconds of all steps since its last line, and not of one step."""
    old = "seconds = args.batch_size / values"
    return swap(text, old, "seconds = args.log_every * args.batch_size / values")


@lie("13b", "alert|log|time", notebook=True)
def the_log_has_no_times(text: str) -> str:
    """The log that the alert reads has steps and seconds, but no time of day, as the trainer's own lines."""
    return swap(text, r"print(f\"{now} step {step}", r"print(f\"step {step}")


def change_alert(module: Any, old: str, new: str) -> None:
    """Change a line of alert.py in what the export writes. ``module`` is helpers.export.launch_files."""

    @instead_of(module, "launch_files")
    def launch_files(original: Any, *inputs: Any, **keywords: Any) -> Any:
        texts = original(*inputs, **keywords)
        return texts | {module.ALERT: swap(texts[module.ALERT], old, new)}


@lie("13b", "log|open_log|alert", module="helpers.export.launch_files")
def a_missing_log_is_an_empty_one(module: Any) -> None:
    """For the alert, a log that is not there is one without lines."""
    change_alert(module, "return None\n    lines = []", "return []\n    lines = []")


@lie("13b", "held|alert", module="helpers.export.launch_files")
def a_held_job_waits_its_turn(module: Any) -> None:
    """The alert takes a job that Slurm holds for one that waits for nodes."""
    change_alert(module, 'if "held" in reason.lower() or reason', "if reason")


@lie("13b", "squeue|ended|alert", module="helpers.export.launch_files")
def a_squeue_that_fails_means_the_end(module: Any) -> None:
    """If `squeue` fails, whatever its reason, the alert says that the job has ended."""
    change_alert(module, "if answer.returncode == 0:", "if answer.returncode >= 0:")


@lie("13b", "alert|trouble|once", module="helpers.export.launch_files")
def the_alert_repeats_itself(module: Any) -> None:
    """The alert says of a job that has ended every five minutes that it has."""
    change_alert(module, "known = memory.read_text().splitlines()", "known = []")


@lie("13b", "silence|start|log", module="helpers.export.launch_files")
def a_new_start_is_silent_since_the_old_one(module: Any) -> None:
    """The alert counts the silence from the last line of the log, also if the job has just started again."""
    change_alert(module, "last_sign = max(started, job.log[-1].written)", "last_sign = job.log[-1].written")


@lie("13b", "goodput|repeated|kept", notebook=True)
def a_repeated_step_counts_twice(text: str) -> str:
    """Goodput counts a step that was taken again after a restart both times."""
    return swap(text, "seconds[int(step)] = every", "seconds[len(seconds)] = every")
