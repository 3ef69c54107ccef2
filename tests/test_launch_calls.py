"""``launch``: what it returns, the ranks' environment, and what can be sent to ranks and back."""

import functools
import inspect
import json
import os
import random
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from forked import AT_ADDRESS, TORCHRUN
from launching import cell, failure, linux, nothing_left, warmed_up  # noqa: F401  (fixtures)

from helpers.ranks.launch import MAX_SECONDS, LaunchError, added_arguments, default_timeout, launch
from helpers.ranks.rank import usable_cores

pytestmark = pytest.mark.ranks
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second

# --- results ----------------------------------------------------------------------------------------------------------


def test_ranks_form_one_gloo_group_and_results_come_in_rank_order():
    def add_and_return_last_rank_first(x):
        dist.all_reduce(x)
        time.sleep(0.1 * (3 - dist.get_rank()))
        return x.item(), dist.get_backend(), dist.get_rank(), dist.get_world_size()

    results = launch(add_and_return_last_rank_first, torch.tensor(2.0), timeout=MAX_SECONDS)
    assert results == [(8.0, "gloo", rank, 4) for rank in range(4)]


def test_ranks_without_a_seed_draw_different_random_numbers():
    """As under torchrun. Forks would all have their parent's random state."""

    def draw():
        return torch.rand(()).item(), np.random.rand(), random.random()

    results = launch(draw, nproc=4)
    for numbers_of_a_library in zip(*results, strict=True):
        assert len(set(numbers_of_a_library)) == 4


def test_values_arrive_and_return_as_they_were():
    values = (
        torch.full((12_500_000,), 3.0),  # 50 MB
        torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
        torch.nn.Parameter(torch.zeros(1)),
        torch.eye(3).to_sparse(),
        np.arange(5, dtype=np.int16),
        {"loss": 0.5, "history": [1, 2], "name": "α", "nothing": None},
    )
    types = [type(value) for value in values]

    def look_at(*arrived):
        return [type(value) for value in arrived], arrived

    for types_that_arrived, returned in launch(look_at, *values, nproc=2):
        assert types_that_arrived == types
        assert [type(value) for value in returned] == types
        assert repr(returned) == repr(values)
        assert torch.equal(returned[0], values[0])  # repr leaves out most of its numbers


def test_functions_that_name_what_cloudpickle_cannot_send():
    """torch's operators, and modules of torch with types of their own, in a function, as a value and as a result."""
    import torch._dynamo

    config = torch._dynamo.config
    aten = torch.ops.aten
    add = aten.add
    add_out = aten.add.out
    x = torch.ones(1)

    def use():
        import torch._dynamo.config as imported_config

        sums = [torch.ops.aten.add(x, x), aten.add(x, x), add(x, x), add_out(x, x, out=torch.zeros(1))]
        is_same_config = imported_config is torch._dynamo.config is config
        return sums, is_same_config, torch.backends.cudnn.benchmark, torch.ops, torch.backends, aten.add.Tensor

    expected = use()
    assert launch(use, nproc=2) == [expected, expected]


def test_ranks_have_the_callers_folder_and_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_only.py").write_text("import os\n\n\ndef answer():\n    return 42, os.getcwd()\n")
    monkeypatch.syspath_prepend(tmp_path)
    import mine_only

    assert launch(mine_only.answer, nproc=2) == [(42, str(tmp_path))] * 2


def test_a_function_that_starts_and_ends_a_group_itself_shares_the_one_that_runs():
    """Many tutorials call init_process_group and destroy_process_group in the function that they give to spawn.

    Here it does so three times, by both of torch's names for each, and once right after DDP's backward.
    """
    names = cell("""
        from torch.distributed import destroy_process_group, init_process_group

        def train(backend, **who):
            init_process_group(backend, **who)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
            model(torch.ones(1, 2)).sum().backward()
            destroy_process_group()
            dist.init_process_group()
            total = torch.ones(1)
            dist.all_reduce(total)
            dist.destroy_process_group()
            return total.item()

        def main(rank, world_size):
            return train("cpu:gloo,cuda:nccl", rank=rank, world_size=world_size), train(None), train("gloo", rank=rank)
    """)
    assert launch(names.main, nproc=2) == [(2.0, 2.0, 2.0)] * 2


def test_a_group_that_the_function_cannot_have_is_refused_with_advice():
    def message_for(**options):
        try:
            dist.init_process_group(**options)
        except ValueError as error:
            return str(error)

    def ask_for_other_groups():
        return [message_for(backend="nccl"), message_for(rank=7), message_for(world_size=2)]

    [messages] = launch(ask_for_other_groups, nproc=1)
    assert messages == [
        "init_process_group(backend='nccl') in a rank of launch, whose group has backend='gloo': "
        "leave backend out, or start the ranks with launch(..., backend='nccl').",
        "init_process_group(rank=7) in a rank of launch, whose group has rank=0: leave rank out.",
        "init_process_group(world_size=2) in a rank of launch, whose group has world_size=1: leave world_size out.",
    ]


def test_a_real_end_ends_the_group():
    """A function may end the group and start another one, at MASTER_ADDR. The end of a smaller group ends only that."""

    def start_anew():
        dist.destroy_process_group()
        was_ended = not dist.is_initialized()
        dist.init_process_group("gloo", group_name="mine")
        total = torch.ones(1)
        dist.all_reduce(total)
        pair = dist.new_group([0, 1])
        dist.barrier(pair)  # a rank that leaves while its peer still connects ends the peer's call
        dist.destroy_process_group(pair)
        return was_ended, total.item(), dist.is_initialized()

    assert launch(start_anew, nproc=2) == [(True, 2.0, True)] * 2


def test_a_function_for_spawn_gets_the_rank_and_the_world_size_that_it_lacks():
    def train(rank, world_size, epochs=1):
        return rank, world_size, epochs

    assert launch(train, 2, nproc=2) == [(0, 2, 1), (1, 2, 1)]  # as in mp.spawn(train, args=(2,), nprocs=2)


def takes_rank_and_size(rank, size):
    pass


def takes_gpu_and_args(gpu, ngpus_per_node, args):
    pass


def takes_rank_epochs_and_lr(rank, epochs, lr):
    pass


@pytest.mark.parametrize(
    ("function", "given", "added"),
    [
        (takes_rank_and_size, (), ["RANK", "WORLD_SIZE"]),
        (takes_gpu_and_args, ("args",), ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
        (functools.partial(takes_rank_epochs_and_lr, lr=0.2), (3,), ["RANK"]),
        (takes_rank_and_size, (5, 6), []),
    ],
    ids=["nothing given", "the last one given", "a partial function", "all given"],
)
def test_the_parameters_of_tutorials_are_filled(function, given, added):
    """A function gets numbers in front of the arguments that are given, by the names that its first parameters have."""
    assert added_arguments(function, given) == added


def test_a_dataclass_with_slots_of_the_notebook_comes_back():
    names = cell("""
        import dataclasses

        @dataclasses.dataclass(slots=True)
        class Step:
            loss: float

        @dataclasses.dataclass(slots=True)
        class Epoch(Step):
            steps: list

        @dataclasses.dataclass(slots=True, frozen=True)
        class Setting:
            lr: float

        def train(given):
            has_slots = not hasattr(given, "__dict__")
            return given, Epoch(0.5, [Step(1.0)]), Setting(0.1), has_slots
    """)
    given = names.Step(2.0)
    [result] = launch(names.train, given, nproc=1)
    assert result == (given, names.Epoch(0.5, [names.Step(1.0)]), names.Setting(0.1), True)


# --- the ranks' surroundings ------------------------------------------------------------------------------------------


# A script in which each rank writes its environment variables to a file, as JSON.
WRITE_ENVIRONMENT = """\
import json, os

with open("rank" + os.environ["RANK"], "w") as file:
    json.dump(dict(os.environ), file)
"""


def environment():
    """All environment variables of this process."""
    return dict(os.environ)


def test_the_environment_is_torchruns(tmp_path, monkeypatch):
    """A rank has the environment variables that torchrun would give it, if a rank serves the store.

    What only torchrun's agent needs is left out, and the ports differ.
    """
    monkeypatch.setenv("MASTER_PORT", "1")  # torchrun and launch have to replace this one
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    (tmp_path / "script.py").write_text(WRITE_ENVIRONMENT)
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=2", *AT_ADDRESS, "script.py"]
    subprocess.run(command, cwd=tmp_path, check=True, stderr=subprocess.DEVNULL)
    environments_of_launch = launch(environment, nproc=2)

    only_for_agent = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    of_terminal = {"COLUMNS", "LINES"}  # readline sets them, which only one side may have imported (Python 3.14)
    port_of_rank_0 = int(environments_of_launch[0]["MASTER_PORT"])
    for rank in range(2):
        ours = environments_of_launch[rank]
        theirs = json.loads((tmp_path / f"rank{rank}").read_text())
        assert theirs.keys() - ours.keys() - of_terminal == only_for_agent
        for name in theirs.keys() - only_for_agent - of_terminal - {"MASTER_PORT"}:
            assert ours[name] == theirs[name], name
        assert int(ours["MASTER_PORT"]) == port_of_rank_0
    assert port_of_rank_0 > 1024


def test_changes_of_the_kernels_environment_reach_the_ranks(monkeypatch):
    monkeypatch.setenv("PAGE", "old")
    monkeypatch.delenv("HOME")  # The forkserver has had it since its start.
    [environment_of_rank] = launch(environment, nproc=1, env={"PAGE": "new"})
    assert environment_of_rank["PAGE"] == "new"
    assert "HOME" not in environment_of_rank
    assert os.environ["PAGE"] == "old"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        pytest.param("64", max(1, usable_cores() // 2), id="above a rank's share of the cores"),
        pytest.param("1,1", 1, id="a lower number for each nested level"),
    ],
)
def test_threads_share_the_cores_and_follow_a_lower_limit(limit, expected):
    numbers_of_threads = launch(torch.get_num_threads, nproc=2, env={"OMP_NUM_THREADS": limit})
    assert numbers_of_threads == [expected, expected]


def test_every_socket_of_the_ranks_is_on_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # the kernel's variable must not reach the ranks

    def sockets():
        dist.barrier()
        return psutil.Process().net_connections(kind="inet")

    for sockets_of_rank in launch(sockets, nproc=2):
        statuses = {socket.status for socket in sockets_of_rank}
        assert psutil.CONN_LISTEN in statuses
        addresses = {socket.laddr.ip for socket in sockets_of_rank}
        assert addresses <= {"127.0.0.1", "::1"}
    server = psutil.Process(forkserver._forkserver._forkserver_pid)
    assert server.net_connections(kind="inet") == []


@linux
def test_data_loader_workers_end_with_their_rank():
    """The two workers of each rank still run when the function returns. The fixture nothing_left looks for them."""

    def read():
        data = torch.utils.data.TensorDataset(torch.arange(64.0))
        loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, persistent_workers=True)
        total = sum(batch.sum().item() for (batch,) in loader)
        workers = psutil.Process().children(recursive=True)
        return total, len(workers)

    assert launch(read, nproc=2) == [(2016.0, 2)] * 2


# --- what cannot travel ----------------------------------------------------------------------------------------------


def test_a_result_that_cannot_be_sent_is_named():
    def return_lock_on_rank_1():
        if dist.get_rank() == 1:
            return threading.Lock()
        return 1

    error = failure(return_lock_on_rank_1, nproc=2)
    assert str(error).startswith(
        "rank 1 failed first: TypeError: the result, a lock, cannot be sent back (cannot pickle '_thread.lock' obj"
    )


def test_a_launch_inside_a_rank_is_refused():
    def launch_again():
        launch(print)

    error = failure(launch_again, nproc=2)
    assert str(error).startswith("ranks 0-1 failed: helpers.ranks.launch.LaunchError: launch was called inside a")


def takes_x_and_args(x, args):
    pass


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((threading.Lock().acquire,), {}, "the function acquire cannot be sent"),
        ((print, 1, threading.Lock()), {}, "argument 1, a lock, cannot be sent"),
        ((3,), {}, "launch needs a function, and got 3"),
        ((takes_x_and_args, 1), {}, "missing a required argument: 'args'.\nPass them: launch(fn, x, args, nproc=4)"),
        ((print,), {"backend": "mpi"}, "backend='mpi' is not a backend of launch.\nUse 'gloo'"),
        ((print,), {"nproc": 0}, "nproc=0 is not a number of ranks between 1 and 64"),
        ((print,), {"timeout": float("nan")}, "timeout is a number of seconds above 0; it was nan"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(args, options, message):
    with pytest.raises(LaunchError) as raised:
        launch(*args, **options)
    assert message in str(raised.value)


def test_a_variable_gives_calls_that_name_no_timeout_more_seconds(monkeypatch):
    in_these_tests = float(os.environ["WORLD_SIZE_ONE_TIMEOUT"])  # conftest.py has set it before launch was imported
    assert inspect.signature(launch).parameters["timeout"].default == in_these_tests != 60
    monkeypatch.delenv("WORLD_SIZE_ONE_TIMEOUT")
    assert default_timeout() == 60


@pytest.mark.parametrize("text", ["", "abc", "nan", "0", "-5", "inf"])
def test_a_variable_that_is_no_number_of_seconds_is_refused_in_two_lines(monkeypatch, text):
    monkeypatch.setenv("WORLD_SIZE_ONE_TIMEOUT", text)
    with pytest.raises(LaunchError) as raised:
        default_timeout()
    first, second = str(raised.value).splitlines()
    assert first == f"WORLD_SIZE_ONE_TIMEOUT is a number of seconds above 0; it was {text!r}."
    assert second.startswith("Unset it, or set it to 300")
