"""Lies (planted faults) about the first run, process groups, launchers and collectives."""

import os
import time
from datetime import timedelta
from typing import Any
from unittest import mock

from sabotage.lies.telling_lies import (
    AGENT,
    C10D,
    DDP,
    LAUNCH,
    SAMPLER,
    give_ranks,
    instead_of,
    lie,
    nothing,
    replace,
    swap,
)

PROCESS_GROUP = "helpers.runtime.process_group"
ERRORS = "torch.distributed.elastic.multiprocessing.errors"

# --- The first run


@lie("00", "met|wrong", notebook=True)
def the_mistake_in_the_loop_is_not_made(text: str) -> str:
    """In chapter 0's loop, every rank adds up its loss, also where only rank 0 should."""
    return swap(text, r"place == \"in the loop\" and rank in callers", r"place == \"in the loop\"")


@lie("00", "epoch", notebook=True)
def the_sampler_is_not_told_the_epoch(text: str) -> str:
    """In chapter 0's distributed loop, nobody tells the sampler the epoch."""
    return swap(text, '"        sampler.set_epoch(epoch)', '"        pass')


@lie("00", "mean|loss", notebook=True)
def the_sum_of_the_losses_is_not_divided(text: str) -> str:
    """Chapter 0's distributed loop prints the sum of the ranks' losses for their mean."""
    return swap(text, "{total.item() / world_size:.3f}", "{total.item():.3f}", times=2)


@lie("00 01", "connection|left|leave", module=C10D)
def a_rank_waits_before_it_leaves(c10d: Any) -> None:
    """`destroy_process_group` waits for the other ranks."""

    @instead_of(c10d, "destroy_process_group")
    def destroy_process_group(original: Any, *inputs: Any, **keywords: Any) -> None:
        c10d.barrier()
        original(*inputs, **keywords)


class ReducerThatKeepsItsBuckets:
    """DDP's reducer, which all-reduces gradients in buckets, without the rebuilding of the buckets after a step."""

    def __init__(self, reducer: Any) -> None:
        self.reducer = reducer

    def _rebuild_buckets(self) -> bool:
        # DDP calls this before each forward. In the second one, DDP's reducer makes its buckets anew, in the order in
        # which rank 0 got its gradients, and rank 0 broadcasts this order. False says that nothing was rebuilt.
        return False

    def __getattr__(self, name: str) -> Any:
        # Python calls this for all that this class does not have, and DDP's own reducer gives it.
        return getattr(self.reducer, name)


@lie("00", "second.*forward", module=DDP)
def ddp_does_not_agree_on_its_buckets(parallel: Any) -> None:
    """The second `forward` of a DDP model broadcasts nothing."""

    @instead_of(parallel.DistributedDataParallel, "__init__")
    def __init__(original: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        original(self, *inputs, **keywords)
        self.reducer = ReducerThatKeepsItsBuckets(self.reducer)


@lie("00", "same order|epoch", module=SAMPLER)
def sampler_counts_epochs_itself(module: Any) -> None:
    """`DistributedSampler` takes another order in each epoch even without `set_epoch`."""

    @instead_of(module.DistributedSampler, "__iter__")
    def indices(original: Any, self: Any) -> Any:
        order = original(self)
        self.epoch += 1
        return order


@lie("00", "adds? up", module=C10D)
def sum_is_on_rank_0_only(module: Any) -> None:
    """`all_reduce` leaves the sum on rank 0 only."""

    @instead_of(module, "all_reduce", waits=True)
    def all_reduce(original: Any, tensor: Any, *inputs: Any, **keywords: Any) -> Any:
        if module.get_rank() == 0:
            return original(tensor, *inputs, **keywords)
        return original(tensor.clone(), *inputs, **keywords)


@lie("00", "10 minutes|timeout", module=PROCESS_GROUP)
def start_process_group_allows_half_an_hour(module: Any) -> None:
    """`start_process_group` sets a timeout of 30 minutes."""
    module.start_process_group.__defaults__ = (None, timedelta(minutes=30))


@lie("00", "30 minutes|timeout", module="torch.distributed.constants")
def gloo_allows_ten_minutes(module: Any) -> None:
    """gloo's default timeout is 10 minutes."""
    replace(module, "default_pg_timeout", timedelta(minutes=10))


@lie("00", "stop_process_group", module=PROCESS_GROUP)
def stop_process_group_stays(module: Any) -> None:
    """`stop_process_group` does not leave the group."""
    replace(module, "stop_process_group", nothing)


@lie("00", "no name|first collective|meet", module=C10D)
def broadcasts_meet_broadcasts_only(module: Any) -> None:
    """A broadcast meets the next broadcast of the other ranks, whatever else they call before it."""

    @instead_of(module, "init_process_group", waits=True)
    def init_process_group(original: Any, *inputs: Any, **keywords: Any) -> None:
        original(*inputs, **keywords)
        module.group_of_broadcasts = module.new_group()

    @instead_of(module, "broadcast", waits=True)
    def broadcast(original: Any, tensor: Any, src: Any = None, group: Any = None, **keywords: Any) -> Any:
        return original(tensor, src, group or module.group_of_broadcasts, **keywords)


@lie("00 01", "this book", module="helpers.export.script")
def exported_script_needs_this_book(module: Any) -> None:
    """An exported script imports `helpers`."""

    @instead_of(module, "script_from_notebook")
    def script_from_notebook(original: Any, *inputs: Any, **keywords: Any) -> str:
        script = original(*inputs, **keywords)
        return script.replace("import argparse\n", "import argparse\nimport helpers.runtime.models\n", 1)


@lie("00", "flag", module="helpers.export.flags")
def exported_script_ignores_its_flags(module: Any) -> None:
    """An exported script ignores its flags."""

    @instead_of(module, "parse_args_text")
    def parse_args_text(original: Any, *inputs: Any, **keywords: Any) -> str:
        return original(*inputs, **keywords).replace("parser.parse_args()", "parser.parse_args([])")


@lie("00", "twice|leaves? out", module=SAMPLER)
def the_sampler_repeats_nothing(module: Any) -> None:
    """`DistributedSampler` leaves out the images that cannot be divided, also without `drop_last=True`."""

    @instead_of(module.DistributedSampler, "__init__")
    def __init__(original: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        original(self, *inputs, **keywords | {"drop_last": True})


@lie("00", "reverse|order", notebook=True)
def the_batches_are_not_reversed(text: str) -> str:
    """In chapter 0, the images of each batch are not read in reverse order."""
    return swap(text, "yield images.flip(0), labels.flip(0)", "yield images, labels")


@lie("00", "local rank", module="helpers.ranks.rank")
def every_rank_of_launch_is_local_rank_0(module: Any) -> None:
    """`launch` sets `LOCAL_RANK` to 0 on every rank."""

    @instead_of(module, "call_function")
    def call_function(original: Any, work: Any) -> Any:
        os.environ["LOCAL_RANK"] = "0"
        return original(work)


@lie("00", "additional call|local_rank", notebook=True)
def only_rank_0_makes_the_additional_call(text: str) -> str:
    """In chapter 0's loop, rank 0 alone makes the additional call, where ranks 0 and 2 should."""
    return swap(text, "callers=[0, 2]", "callers=[0]")


# --- Groups, launchers, meshes


@lie("00", "each of them its number|world of four|rank", module=LAUNCH)
def launch_returns_results_backwards(module: Any) -> None:
    """`launch` returns the ranks' results in the wrong order."""

    @instead_of(module, "launch")
    def launch(original: Any, *inputs: Any, **keywords: Any) -> Any:
        return original(*inputs, **keywords)[::-1]


@lie("00 06c 02 03b 04b", "hang|stands still|timeout|wait|never come", module=LAUNCH)
def launch_forgives_a_hang(module: Any) -> None:
    """`launch` returns when a rank hangs, and says nothing."""

    @instead_of(module, "launch")
    def launch(original: Any, *inputs: Any, nproc: int = 4, **keywords: Any) -> Any:
        try:
            return original(*inputs, nproc=nproc, **keywords)
        except module.RankError as error:
            is_hang = " still ran after " in str(error)
            if not is_hang:
                raise
            return [None] * nproc


@lie("04 06", "rank", module=LAUNCH)
def launch_drops_a_ranks_output(module: Any) -> None:
    """`launch` does not show what the last rank printed."""

    @instead_of(module, "fold")
    def fold(original: Any, outputs: Any) -> Any:
        return original(outputs[:-1])


@lie("01 12", "local.rank", module=AGENT)
def local_rank_is_the_rank(agent: Any) -> None:
    """`torchrun` sets `LOCAL_RANK` to the rank, so that a second node asks for devices that it does not have."""
    give_ranks(agent, lambda env: {"LOCAL_RANK": env["RANK"]})


@lie("01", "exported", module=AGENT)
def an_exported_local_rank_wins(agent: Any) -> None:
    """`torchrun` leaves `LOCAL_RANK` as it was exported."""
    give_ranks(agent, lambda env: {"LOCAL_RANK": os.environ.get("LOCAL_RANK", env["LOCAL_RANK"])})


@lie("01", "gpu|starts|lost", module="torch.distributed.run")
def torchrun_counts_a_lost_gpu(module: Any) -> None:
    """`torchrun --nproc-per-node=gpu` starts a rank for a GPU that a node of eight has lost."""

    @instead_of(module, "determine_local_world_size")
    def determine_local_world_size(original: Any, nproc_per_node: str) -> int:
        if nproc_per_node == "gpu" and module.torch.cuda.device_count() > 1:
            return 8
        return original(nproc_per_node)


@lie("12", "node", module=AGENT)
def every_node_is_node_0(agent: Any) -> None:
    """`torchrun` sets `GROUP_RANK` to 0 on every node."""
    give_ranks(agent, lambda env: {"GROUP_RANK": "0"})


@lie("01", "GPU|backend", module="helpers.runtime.process_group")
def nccl_starts_without_a_gpu(module: Any) -> None:
    """`start_process_group` starts NCCL on a rank for which there is no GPU."""

    @instead_of(module, "start_process_group")
    def start_process_group(original: Any, backend: str | None = None, *inputs: Any, **keywords: Any) -> Any:
        if backend != "nccl":
            return original(backend, *inputs, **keywords)
        with mock.patch.object(module.torch.cuda, "device_count", lambda: 64):
            return original(backend, *inputs, **keywords)


@lie("01", "backend", module="helpers.runtime.process_group")
def a_missing_gpu_is_forgiven(module: Any) -> None:
    """`start_process_group` takes gloo where it is told to take NCCL and finds no GPU."""

    @instead_of(module, "start_process_group")
    def start_process_group(true: Any, backend: str | None = None, *inputs: Any, **keywords: Any) -> Any:
        return true(None, *inputs, **keywords)


@lie("06c", "group", module=C10D)
def new_group_takes_everybody(c10d: Any) -> None:
    """`new_group` makes a group of all ranks, whichever ranks it is given."""
    original = c10d.new_group
    replace(c10d, "new_group", lambda ranks=None, *inputs, **keywords: original(None, *inputs, **keywords))


@lie("06c", "members|group", notebook=True)
def a_group_of_its_members_alone_is_not_counted(text: str) -> str:
    """A group that only its members make leaves the names of later groups alone."""
    return swap(text, "dist.new_group([1, 2], use_local_synchronization=True)", "dist.get_rank()")


@lie("12", "barrier", module=C10D)
def barrier_does_not_wait(c10d: Any) -> None:
    """`barrier` returns at once, and waits for nobody."""
    calls = []

    @instead_of(c10d, "barrier")
    def barrier(original: Any, *inputs: Any, **keywords: Any) -> Any:
        calls.append(inputs)
        if len(calls) > 1:
            return None
        return original(*inputs, **keywords)  # the first call is launch's own


@lie("12", "monitored.?barrier|roll call", module=C10D)
def monitored_barrier_blames_another_rank(c10d: Any) -> None:
    """`monitored_barrier` names the rank after the one that is missing."""
    import re

    @instead_of(c10d, "monitored_barrier")
    def monitored_barrier(original: Any, *inputs: Any, **keywords: Any) -> Any:
        try:
            return original(*inputs, **keywords)
        except RuntimeError as error:

            def next_rank(match: re.Match[str]) -> str:
                return f"Rank {int(match[1]) + 1}"

            text = re.sub(r"Ranks? (\d)", next_rank, str(error))  # "Rank 2" or "Ranks 2, 3" becomes "Rank 3"
            raise RuntimeError(text) from None


@lie("06c", "order", notebook=True)
def a_mesh_always_keeps_the_order_of_its_ranks(text: str) -> str:
    """The group of a mesh gathers in the order of the mesh, without `preserve_rank_order`, too."""
    return swap(text, "return ranks.tolist()", "return mesh.mesh.tolist()")


@lie("06c", "mesh|axis|axes", module="torch.distributed.device_mesh")
def mesh_counts_columns_first(module: Any) -> None:
    """`init_device_mesh` numbers the ranks along the first axis, so that neighbours are far apart."""

    def init_device_mesh(device_type: Any, mesh_shape: Any, *, mesh_dim_names: Any = None, **_: Any) -> Any:
        import torch

        # For the shape (2, 3) torch's mesh is [[0, 1, 2], [3, 4, 5]], and this one is [[0, 2, 4], [1, 3, 5]].
        world_size = torch.Size(mesh_shape).numel()
        reversed_shape = mesh_shape[::-1]
        reversed_axes = range(len(mesh_shape))[::-1]
        ranks = torch.arange(world_size).reshape(reversed_shape).permute(*reversed_axes)
        return module.DeviceMesh(device_type, ranks.contiguous(), mesh_dim_names=mesh_dim_names)

    replace(module, "init_device_mesh", init_device_mesh)


@lie("01", "local-rank|LOCAL_RANK|local rank", module=AGENT)
def torchrun_passes_the_old_flag(module: Any) -> None:
    """torchrun passes `--local-rank` to the script."""

    @instead_of(module, "start_processes")
    def start_processes(original: Any, *inputs: Any, args: dict[int, Any], **keywords: Any) -> Any:
        args_with_flag = {}  # of the script, by local rank
        for local_rank, args_of_rank in args.items():
            args_with_flag[local_rank] = (*args_of_rank, f"--local-rank={local_rank}")
        return original(*inputs, args=args_with_flag, **keywords)


@lie("01", "k \\+ 1|missing", module=C10D)
def all_reduce_forgets_rank_0(module: Any) -> None:
    """`all_reduce` leaves out what rank 0 has."""

    @instead_of(module, "all_reduce")
    def all_reduce(original: Any, tensor: Any, *inputs: Any, **keywords: Any) -> Any:
        if module.get_rank() == 0:
            tensor.zero_()
        return original(tensor, *inputs, **keywords)


@lie("01", "no warning|says nothing", module=C10D)
def a_group_without_gpus_warns(module: Any) -> None:
    """PyTorch warns when it chooses the backend and finds no GPU."""

    @instead_of(module, "init_process_group")
    def init_process_group(original: Any, backend: Any = None, *inputs: Any, **keywords: Any) -> None:
        if backend is None:
            print("UserWarning: there is no GPU, so gloo is used")
        original(backend, *inputs, **keywords)


@lie("01", "argument|hello", module="torch.multiprocessing.spawn")
def spawn_tells_each_process_rank_0(module: Any) -> None:
    """`mp.spawn` passes 0 to each process."""

    @instead_of(module, "_wrap")
    def _wrap(original: Any, fn: Any, i: int, args: Any, error_file: Any) -> None:
        original(fn, 0, args, error_file)


@lie("01", "spawn", module="torch.multiprocessing.spawn")
def spawn_forks(module: Any) -> None:
    """`mp.spawn` forks, so that the new process has the function of a cell."""

    @instead_of(module, "start_processes")
    def start_processes(original: Any, *inputs: Any, start_method: str = "fork", **keywords: Any) -> Any:
        return original(*inputs, start_method="fork", **keywords)


@lie("01", "connections", module=C10D)
def a_rank_that_leaves_keeps_its_connections(module: Any) -> None:
    """A rank that has left its group keeps its connections open."""
    left = []

    @instead_of(module, "destroy_process_group")
    def destroy_process_group(original: Any, group: Any = None) -> None:
        left.append(module.group.WORLD)
        original(group)


@lie("01", "root cause|failed first", module=ERRORS)
def the_root_cause_is_the_lowest_rank(module: Any) -> None:
    """`torchrun` names the lowest rank that ended as the root cause, and not the first one."""

    @instead_of(module.ChildFailedError, "get_first_failure")
    def get_first_failure(original: Any, self: Any) -> Any:
        rank = min(self.failures)
        return rank, self.failures[rank]


@lie("01", "summary", module=ERRORS)
def the_summary_of_torchrun_quotes_the_error(module: Any) -> None:
    """The summary that `torchrun` prints at the end quotes the error of the rank that failed."""

    @instead_of(module.ChildFailedError, "_format_failure")
    def _format_failure(original: Any, *inputs: Any, **keywords: Any) -> Any:
        text, width = original(*inputs, **keywords)
        return text.replace("traceback : ", "traceback : ValueError: no data for rank 1 "), width


@lie("01", "Open MPI|MPICH", module=PROCESS_GROUP)
def tasks_of_mpirun_are_not_noticed(module: Any) -> None:
    """`start_process_group` does not notice that `mpirun` has started several tasks."""

    @instead_of(module, "start_process_group", waits=True)
    def start_process_group(original: Any, *inputs: Any, **keywords: Any) -> Any:
        with mock.patch.dict(os.environ):
            os.environ.pop("OMPI_COMM_WORLD_SIZE", None)
            os.environ.pop("PMI_SIZE", None)
            return original(*inputs, **keywords)


# --- Collectives


@lie("02 03 04 12", "all.?reduce|collective|adds? up|count|average|links", module=C10D)
def all_reduce_adds_nothing(c10d: Any) -> None:
    """`all_reduce` returns, and every rank keeps its own numbers."""

    def all_reduce(tensor: Any, op: Any = None, group: Any = None, async_op: Any = False) -> Any:
        return c10d.barrier(group=group, async_op=async_op)

    replace(c10d, "all_reduce", all_reduce)


@lie("02", "AVG|operation", module=C10D)
def all_reduce_sums_where_it_should_average(c10d: Any) -> None:
    """`all_reduce` with `AVG` gives the sum."""

    @instead_of(c10d, "all_reduce")
    def all_reduce(
        original: Any, tensor: Any, op: Any = c10d.ReduceOp.SUM, group: Any = None, async_op: Any = False
    ) -> Any:
        if op == c10d.ReduceOp.AVG:
            op = c10d.ReduceOp.SUM
        return original(tensor, op, group, async_op)


@lie("02", "handle|async", module=C10D)
def async_all_reduce_waits(c10d: Any) -> None:
    """`all_reduce` with `async_op=True` returns when the exchange is over."""

    @instead_of(c10d, "all_reduce")
    def all_reduce(
        original: Any, tensor: Any, op: Any = c10d.ReduceOp.SUM, group: Any = None, async_op: Any = False
    ) -> Any:
        work = original(tensor, op, group, async_op)
        if async_op:
            work.wait()
        return work


@lie("02", "broadcast", module=C10D)
def broadcast_from_the_wrong_rank(c10d: Any) -> None:
    """`broadcast` sends the last rank's tensor, whichever rank is the source."""

    @instead_of(c10d, "broadcast")
    def broadcast(
        original: Any, tensor: Any, src: Any = None, group: Any = None, async_op: Any = False, group_src: Any = None
    ) -> Any:
        last_rank = c10d.get_world_size(group) - 1
        return original(tensor, group=group, async_op=async_op, group_src=last_rank)


@lie("02", "scatter", module=C10D)
def scatter_deals_backwards(c10d: Any) -> None:
    """`scatter` gives the first part to the last rank."""

    @instead_of(c10d, "scatter")
    def scatter(original: Any, tensor: Any, scatter_list: Any = None, *inputs: Any, **keywords: Any) -> Any:
        if scatter_list is not None:  # only the rank that scatters has parts
            scatter_list = scatter_list[::-1]
        return original(tensor, scatter_list, *inputs, **keywords)


@lie("02", "reduce", module=C10D)
def reduce_gives_the_sum_to_all(c10d: Any) -> None:
    """`reduce` leaves the sum on every rank."""

    def reduce(tensor: Any, dst: Any = None, op: Any = c10d.ReduceOp.SUM, group: Any = None, **keywords: Any) -> Any:
        return c10d.all_reduce(tensor, op, group, keywords.get("async_op", False))

    replace(c10d, "reduce", reduce)


@lie("02", "gather", module=C10D)
def all_gather_in_the_wrong_order(c10d: Any) -> None:
    """`all_gather` puts the ranks' parts in the wrong order."""

    @instead_of(c10d, "all_gather_single")
    def all_gather_single(original: Any, output: Any, part: Any, *inputs: Any, **keywords: Any) -> Any:
        work = original(output, part, *inputs, **keywords)
        parts = output.clone().view(-1, part.numel())  # a row for each rank
        output.copy_(parts.flip(0).view_as(output))
        return work


@lie("02", "reduce.scatter", module=C10D)
def reduce_scatter_gives_all_the_first_part(c10d: Any) -> None:
    """`reduce_scatter` gives every rank the first part of the sum."""

    def reduce_scatter_single(output: Any, whole: Any, *inputs: Any, **keywords: Any) -> Any:
        total = whole.clone()
        c10d.all_reduce(total)
        output.copy_(total.flatten()[: output.numel()].view_as(output))

    replace(c10d, "reduce_scatter_single", reduce_scatter_single)


@lie("02", "all.to.all|transpos", module=C10D)
def all_to_all_does_not_transpose(c10d: Any) -> None:
    """`all_to_all` gives every rank its own parts back."""
    replace(c10d, "all_to_all_single", lambda output, whole, *inputs, **keywords: output.copy_(whole))


@lie("00 02", "DETAIL", module="torch.distributed")
def detail_compares_nothing(module: Any) -> None:
    """`TORCH_DISTRIBUTED_DEBUG=DETAIL` is ignored: ranks do not compare their collectives."""
    replace(module, "set_debug_level_from_env", lambda: None)


@lie("02", "order|receive", module=C10D)
def receives_of_a_batch_are_turned_round(c10d: Any) -> None:
    """`batch_isend_irecv` starts the last receive first."""

    @instead_of(c10d, "batch_isend_irecv")
    def batch_isend_irecv(original: Any, operations: Any) -> Any:
        has_only_receives = all(operation.op is c10d.irecv for operation in operations)
        if has_only_receives:
            operations = list(reversed(operations))
        return original(operations)


@lie("02", "barrier", module=C10D)
def barrier_waits_for_nobody(c10d: Any) -> None:
    """`barrier` returns at once, also when other ranks have not called it."""
    replace(c10d, "barrier", nothing)


@lie("02", "ten minutes|timeout", module="torch.distributed.constants")
def nccl_allows_half_an_hour(module: Any) -> None:
    """NCCL's default timeout is 30 minutes."""
    replace(module, "default_pg_nccl_timeout", timedelta(minutes=30))


@lie("02", "slowest", notebook=True)
def the_clock_reports_the_fastest_rank(text: str) -> str:
    """Chapter 2's clock reports the fastest rank."""
    return swap(
        text, "dist.all_reduce(seconds, op=dist.ReduceOp.MAX)", "dist.all_reduce(seconds, op=dist.ReduceOp.MIN)"
    )


@lie("02", "latency", module=C10D)
def an_all_reduce_costs_its_bytes_alone(c10d: Any) -> None:
    """An `all_reduce` takes so long for each byte that its latency does not count."""

    @instead_of(c10d, "all_reduce")
    def all_reduce(original: Any, tensor: Any, *inputs: Any, **keywords: Any) -> Any:
        time.sleep(tensor.nbytes * 100e-9)  # 0.4 s for 4 MiB
        return original(tensor, *inputs, **keywords)


@lie("02", "WRONG|wrong|busbw", notebook=True)
def the_bus_carries_all_bytes_of_an_all_to_all(text: str) -> str:
    """Chapter 2's benchmark counts what a rank keeps for itself as bytes that a link carries."""
    return swap(text, "output, parts_for_me, one_way)", "output, parts_for_me, 1)")


@lie("02", "WRONG|wrong", notebook=True)
def the_table_hides_a_wrong_result(text: str) -> str:
    """The table of chapter 2's benchmark does not say which results are wrong."""
    return swap(text, r"line += \"  WRONG\"", r"line += \"\"")


@lie("02", "wrong|notice", notebook=True)
def the_benchmark_asks_rank_0_alone(text: str) -> str:
    """Chapter 2's benchmark asks rank 0 alone whether a result is right."""
    call = "dist.all_reduce(equal, op=dist.ReduceOp.MIN)  # 1 if equal on every rank"
    return swap(text, call, "dist.all_gather([torch.empty_like(equal) for _ in range(world_size)], equal)")


@lie("02b", "gather|gradient", module="torch.distributed._functional_collectives")
def a_gather_has_only_its_own_gradient(module: Any) -> None:
    """The functional all-gather passes no gradient to the other ranks."""

    @instead_of(module, "all_gather_single")
    def all_gather_single(original: Any, tensor: Any, gather_dim: int, group: Any, tag: str = "") -> Any:
        import torch

        # All parts are detached from the graph, but for the rank's own.
        gathered = original(tensor.detach(), gather_dim, group, tag)
        parts = list(gathered.chunk(group.size(), gather_dim))
        parts[group.rank()] = tensor
        return torch.cat(parts, gather_dim)


@lie("02b", "contiguous", module=C10D)
def broadcast_is_right_for_a_column(c10d: Any) -> None:
    """On gloo `broadcast` is right for a non-contiguous tensor, too."""

    @instead_of(c10d, "broadcast")
    def broadcast(original: Any, tensor: Any, *inputs: Any, **keywords: Any) -> Any:
        packed = tensor.contiguous()
        work = original(packed, *inputs, **keywords)
        if packed is not tensor:
            tensor.copy_(packed)
        return work


@lie("02b", "reduce.scatter", module=C10D)
def reduce_scatter_is_its_own_exchange(c10d: Any) -> None:
    """On gloo `reduce_scatter` is not an all-reduce: rank 0 gets the sum, and deals it out."""

    def reduce_scatter_single(output: Any, whole: Any, *inputs: Any, **keywords: Any) -> Any:
        total = whole.contiguous().clone()
        c10d.reduce(total, 0)
        parts = None
        if c10d.get_rank() == 0:  # only rank 0 has the sum, and scatters it
            parts = [part.clone().view_as(output) for part in total.flatten().split(output.numel())]
        c10d.scatter(output, parts, 0)

    replace(c10d, "reduce_scatter_single", reduce_scatter_single)


@lie("02", "barrier|waits", module=C10D)
def barrier_waits_for_rank_0(module: Any) -> None:
    """`barrier` returns as soon as rank 0 has called it."""

    @instead_of(module, "barrier", waits=True)
    def barrier(original: Any, *inputs: Any, **keywords: Any) -> Any:
        return module.broadcast(module.torch.zeros(1), src=0)


@lie("02", "before or after|batch", module=C10D)
def a_batch_must_begin_with_its_sends(module: Any) -> None:
    """`batch_isend_irecv` refuses a receive before a send."""

    @instead_of(module, "batch_isend_irecv")
    def batch_isend_irecv(original: Any, p2p_op_list: Any) -> Any:
        receives_first = p2p_op_list[0].op is module.irecv
        if receives_first and any(operation.op is module.isend for operation in p2p_op_list):
            raise RuntimeError("sends come first")
        return original(p2p_op_list)


@lie("02", "waits? in `send`|send", module=C10D)
def send_returns_at_once(module: Any) -> None:
    """`send` returns before the other rank receives."""
    kept = []

    @instead_of(module, "send")
    def send(original: Any, tensor: Any, dst: Any = None, *inputs: Any, **keywords: Any) -> None:
        kept.append(module.isend(tensor, dst, *inputs, **keywords))


@lie("02", "scratch|partial sums|reduce", module=C10D)
def reduce_leaves_other_tensors_alone(module: Any) -> None:
    """`reduce` on gloo leaves the tensors of the other ranks as they were."""

    @instead_of(module, "reduce")
    def reduce(original: Any, tensor: Any, dst: Any = None, *inputs: Any, **keywords: Any) -> Any:
        before = tensor.clone()
        original(tensor, dst, *inputs, **keywords)
        if module.get_rank() != dst:
            tensor.copy_(before)


@lie("02", "same bits|last bit|bits", module=C10D)
def rank_1_has_other_last_bits(module: Any) -> None:
    """The sum of an `all_reduce` of floats differs on rank 1 in the last bits."""

    @instead_of(module, "all_reduce")
    def all_reduce(original: Any, tensor: Any, *inputs: Any, **keywords: Any) -> Any:
        result = original(tensor, *inputs, **keywords)
        if module.get_rank() == 1 and tensor.is_floating_point() and tensor.numel() > 1000:
            tensor.mul_(1 + 2e-7)
        return result


@lie("02", "dtype", module=C10D)
def gloo_notices_a_different_dtype(module: Any) -> None:
    """gloo refuses an `all_reduce` whose ranks have different dtypes."""

    def is_call_of_the_chapter(tensor: Any, group: Any, keywords: dict[str, Any]) -> bool:
        # The chapter adds one number of four bytes, an int32 on one rank and a float32 on another.
        is_single_number = tensor.numel() == 1 and tensor.element_size() == 4
        is_plain_call = group is None and not keywords
        return is_single_number and is_plain_call

    @instead_of(module, "all_reduce", waits=True)
    def all_reduce(
        original: Any, tensor: Any, op: Any = module.ReduceOp.SUM, group: Any = None, **keywords: Any
    ) -> Any:
        # The real all_reduce of gloo does not compare the ranks' dtypes. This one raises a RuntimeError if one rank
        # gives an integer and another one a float. To know it, the ranks need a collective before their own. So only
        # the chapter's call is checked: other calls may be made by some ranks alone, and the others would not answer.
        if is_call_of_the_chapter(tensor, group, keywords):
            is_float = tensor.is_floating_point()
            float_and_integer = module.torch.tensor([is_float, not is_float], dtype=module.torch.int32)  # [1, 0]
            # With the maximum over all ranks, this becomes [1, 1] if some rank has a float and another one an integer.
            original(float_and_integer, module.ReduceOp.MAX)
            some_rank_has_a_float, some_rank_has_an_integer = float_and_integer.tolist()
            if some_rank_has_a_float and some_rank_has_an_integer:
                raise RuntimeError("different dtypes")
        return original(tensor, op, group, **keywords)


@lie("02 02b", "unequal|refuse", module=C10D)
def gloo_gathers_unequal_parts(module: Any) -> None:
    """On gloo, `all_gather` takes tensors of unequal sizes."""

    @instead_of(module, "all_gather")
    def all_gather(original: Any, tensor_list: Any, tensor: Any, *inputs: Any, **keywords: Any) -> Any:
        tensor_list[module.get_rank()].copy_(tensor)
        for source, part in enumerate(tensor_list):
            module.broadcast(part, src=source)


@lie("02b", "cpu:gloo,cuda:nccl|both backends", module=C10D)
def a_group_of_two_backends_takes_no_cpu_tensors(module: Any) -> None:
    """A group with a backend for the CPU and one for GPUs takes tensors on GPUs only."""

    @instead_of(module, "new_group")
    def new_group(original: Any, *inputs: Any, **keywords: Any) -> Any:
        backend = keywords.get("backend")
        if isinstance(backend, str) and "," in backend:
            keywords["backend"] = backend.partition(",")[2]
        return original(*inputs, **keywords)


@lie("02b", "contiguous", module=C10D)
def all_to_all_keeps_what_a_rank_has(module: Any) -> None:
    """`all_to_all_single` of a contiguous column gives each rank its own numbers back."""

    @instead_of(module, "all_to_all_single")
    def all_to_all_single(original: Any, output: Any, tensor: Any, *inputs: Any, **keywords: Any) -> Any:
        original(output, tensor, *inputs, **keywords)
        output.copy_(tensor)


@lie("02b", "AVG", module=C10D)
def gloo_divides_before_it_adds(module: Any) -> None:
    """On gloo, `AVG` divides before it adds."""

    @instead_of(module, "all_reduce")
    def all_reduce(original: Any, tensor: Any, op: Any = module.ReduceOp.SUM, *inputs: Any, **keywords: Any) -> Any:
        if op == module.ReduceOp.AVG:
            tensor /= module.get_world_size()
            op = module.ReduceOp.SUM
        return original(tensor, op, *inputs, **keywords)


@lie("02b", "integers", module=C10D)
def an_average_of_integers_is_refused_before_the_sum(module: Any) -> None:
    """On gloo, an average of integers raises its error before anything is written into the tensor."""

    @instead_of(module, "all_reduce")
    def all_reduce(original: Any, tensor: Any, op: Any = module.ReduceOp.SUM, *inputs: Any, **keywords: Any) -> Any:
        if op == module.ReduceOp.AVG and not tensor.is_floating_point():
            raise RuntimeError("result type Float can't be cast to the desired output type Long")
        return original(tensor, op, *inputs, **keywords)


@lie("02b", "bool", module=C10D)
def gloo_takes_the_maximum_of_bools(module: Any) -> None:
    """On gloo, the `SUM` of a bool tensor is its maximum, so that True stays True."""

    @instead_of(module, "all_reduce")
    def all_reduce(original: Any, tensor: Any, op: Any = module.ReduceOp.SUM, *inputs: Any, **keywords: Any) -> Any:
        import torch

        if op == module.ReduceOp.SUM and tensor.dtype == torch.bool:
            op = module.ReduceOp.MAX
        return original(tensor, op, *inputs, **keywords)


@lie("02b", "channels_last", module=C10D)
def broadcast_is_right_for_channels_last(module: Any) -> None:
    """`broadcast` puts each number into its place, also if one rank's tensor has the `channels_last` format."""

    @instead_of(module, "broadcast")
    def broadcast(original: Any, tensor: Any, *inputs: Any, **keywords: Any) -> Any:
        if tensor.dim() != 4:
            return original(tensor, *inputs, **keywords)
        in_order = tensor.contiguous()
        work = original(in_order, *inputs, **keywords)
        tensor.copy_(in_order)
        return work


@lie("02b", "BOR", module=C10D)
def gloo_refuses_bitwise_operations(module: Any) -> None:
    """On gloo, `BAND`, `BOR` and `BXOR` are refused."""

    @instead_of(module, "all_reduce")
    def all_reduce(original: Any, tensor: Any, op: Any = module.ReduceOp.SUM, *inputs: Any, **keywords: Any) -> Any:
        if op in (module.ReduceOp.BAND, module.ReduceOp.BOR, module.ReduceOp.BXOR):
            raise RuntimeError("Cannot use ReduceOp.BAND with gloo")
        return original(tensor, op, *inputs, **keywords)


@lie("02b", "fits|size", module=C10D)
def gloo_takes_an_output_that_is_too_long(module: Any) -> None:
    """On gloo, `all_gather_single` takes an output that is longer than all parts together."""

    @instead_of(module, "all_gather_single")
    def all_gather_single(original: Any, output: Any, tensor: Any, *inputs: Any, **keywords: Any) -> Any:
        return original(output[: tensor.numel() * module.get_world_size()], tensor, *inputs, **keywords)


@lie("02b", "gradient", module="torch.distributed._functional_collectives")
def functional_all_reduce_has_a_local_gradient(module: Any) -> None:
    """The gradient of the functional `all_reduce` leaves out the losses of the other ranks."""

    @instead_of(module, "all_reduce")
    def all_reduce(original: Any, tensor: Any, *inputs: Any, **keywords: Any) -> Any:
        total = original(tensor.detach(), *inputs, **keywords)
        return tensor + (total - tensor.detach())


@lie("02b", "pickle|bytes|scatter_object_list", module=C10D)
def scatter_object_list_sends_nothing(module: Any) -> None:
    """`scatter_object_list` sends nothing: each rank takes its object from its own list."""

    @instead_of(module, "scatter_object_list")
    def scatter_object_list(original: Any, output: Any, objects: Any = None, *inputs: Any, **keywords: Any) -> None:
        output[0] = None
        if objects is not None:
            output[0] = objects[module.get_rank()]


@lie("02b", "MAX", module=C10D)
def a_maximum_of_flags_asks_all(module: Any) -> None:
    """The `MAX` of a bool tensor is True only if it is True on all ranks."""

    @instead_of(module, "all_reduce")
    def all_reduce(original: Any, tensor: Any, op: Any = module.ReduceOp.SUM, *inputs: Any, **keywords: Any) -> Any:
        if tensor.dtype == module.torch.bool and op == module.ReduceOp.MAX:
            op = module.ReduceOp.MIN
        return original(tensor, op, *inputs, **keywords)


@lie("02b", "dtype", module=C10D)
def gloo_gathers_into_another_dtype(module: Any) -> None:
    """On gloo, `all_gather_single` takes an output of another dtype than its input."""

    @instead_of(module, "all_gather_single")
    def all_gather_single(original: Any, output: Any, tensor: Any, *inputs: Any, **keywords: Any) -> Any:
        return original(output.to(tensor.dtype), tensor, *inputs, **keywords)


@lie("02b", "largest|memory", module=C10D)
def gather_object_gives_all_objects_to_all(module: Any) -> None:
    """`gather_object` sends all objects to all ranks, so that it saves no memory."""

    def gather_object(obj: Any, object_gather_list: Any = None, dst: Any = None, *inputs: Any, **keywords: Any) -> None:
        objects = [None] * module.get_world_size()
        module.all_gather_object(objects, obj)
        if module.get_rank() == dst:
            object_gather_list[:] = objects

    replace(module, "gather_object", gather_object)
