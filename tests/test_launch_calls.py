"""``launch``: what it returns, the ranks' environment, and what can be sent to ranks and back."""

import functools
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

from helpers.ranks.launch import MAX_SECONDS, LaunchError, added_arguments, launch
from helpers.ranks.rank import usable_cores

pytestmark = pytest.mark.ranks
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second

# --- results ----------------------------------------------------------------------------------------------------------


def test_ranks_form_one_gloo_group_and_results_come_in_rank_order():
    def late_first(x):
        dist.all_reduce(x)
        time.sleep(0.1 * (3 - dist.get_rank()))
        return x.item(), dist.get_backend(), dist.get_rank(), dist.get_world_size()

    results = launch(late_first, torch.tensor(2.0), timeout=MAX_SECONDS)
    assert results == [(8.0, "gloo", rank, 4) for rank in range(4)]


def test_ranks_without_a_seed_draw_different_random_numbers():
    """As under torchrun. Forks would all have their parent's random state."""

    def draw():
        return torch.rand(()).item(), np.random.rand(), random.random()

    for of_one_library in zip(*launch(draw, nproc=4), strict=True):
        assert len(set(of_one_library)) == 4


def test_values_arrive_and_return_as_they_were():
    values = (
        torch.full((12_500_000,), 3.0),  # 50 MB
        torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
        torch.nn.Parameter(torch.zeros(1)),
        torch.eye(3).to_sparse(),
        np.arange(5, dtype=np.int16),
        {"loss": 0.5, "history": [1, 2], "name": "α", "nothing": None},
    )
    for kinds, results in launch(lambda *values: ([*map(type, values)], values), *values, nproc=2):
        assert kinds == [*map(type, values)] == [*map(type, results)]
        assert repr(results) == repr(values) and torch.equal(results[0], values[0])


def test_functions_that_name_what_cloudpickle_cannot_send():
    """torch's operators, and modules of torch with types of their own, in a function, as a value and as a result."""
    import torch._dynamo

    config, aten, x = torch._dynamo.config, torch.ops.aten, torch.ones(1)
    add, add_out = aten.add, aten.add.out

    def use():
        import torch._dynamo.config as imported

        values = torch.ops.aten.add(x, x), aten.add(x, x), add(x, x), add_out(x, x, out=torch.zeros(1))
        same = imported is torch._dynamo.config is config
        return values, same, torch.backends.cudnn.benchmark, torch.ops, torch.backends, aten.add.Tensor

    assert launch(use, nproc=2) == [use()] * 2


def test_ranks_have_the_callers_folder_and_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_only.py").write_text("import os\n\n\ndef answer():\n    return 42, os.getcwd()\n")
    monkeypatch.syspath_prepend(tmp_path)
    import mine_only

    assert launch(mine_only.answer, nproc=2) == [(42, str(tmp_path))] * 2


def test_a_function_that_starts_and_ends_a_group_itself_shares_the_one_that_runs():
    """As tutorials' setup and cleanup do, by any of torch's names, and with the end right after DDP's backward."""
    names = cell("""
        from torch.distributed import destroy_process_group, init_process_group

        def train(backend, **who):
            init_process_group(backend, **who)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
            model(torch.ones(1, 2)).sum().backward()
            destroy_process_group()
            dist.init_process_group()
            dist.all_reduce(total := torch.ones(1))
            dist.destroy_process_group()
            return total.item()

        def main(rank, world_size):
            return train("cpu:gloo,cuda:nccl", rank=rank, world_size=world_size), train(None), train("gloo", rank=rank)
    """)
    assert launch(names.main, nproc=2) == [(2.0, 2.0, 2.0)] * 2


def test_a_group_that_the_function_cannot_have_is_refused_with_advice():
    def refusal(**options):
        try:
            dist.init_process_group(**options)
        except ValueError as error:
            return str(error)

    [refusals] = launch(lambda: [refusal(backend="nccl"), refusal(rank=7), refusal(world_size=2)], nproc=1)
    assert refusals == [
        "init_process_group(backend='nccl') in a rank of launch, whose group has backend='gloo': "
        "leave backend out, or start the ranks with launch(..., backend='nccl').",
        "init_process_group(rank=7) in a rank of launch, whose group has rank=0: leave rank out.",
        "init_process_group(world_size=2) in a rank of launch, whose group has world_size=1: leave world_size out.",
    ]


def test_a_real_end_ends_the_group():
    def start_anew():  # at MASTER_ADDR, in which torchrun's ranks would find a store
        dist.destroy_process_group()
        before = dist.is_initialized()
        dist.init_process_group("gloo", group_name="mine")
        dist.all_reduce(total := torch.ones(1))
        pair = dist.new_group([0, 1])
        dist.barrier(pair)  # a rank that leaves while its peer still connects ends the peer's call
        dist.destroy_process_group(pair)
        return before, total.item(), dist.is_initialized()

    assert launch(start_anew, nproc=2) == [(False, 2.0, True)] * 2


def test_a_function_for_spawn_gets_the_rank_and_the_world_size_that_it_lacks():
    def train(rank, world_size, epochs=1):
        return rank, world_size, epochs

    assert launch(train, 2, nproc=2) == [(0, 2, 1), (1, 2, 1)]  # as in mp.spawn(train, args=(2,), nprocs=2)


@pytest.mark.parametrize(
    ("fn", "args", "added"),
    [
        (lambda rank, size: 0, (), ["RANK", "WORLD_SIZE"]),  # the names of several tutorials
        (lambda gpu, ngpus_per_node, args: 0, ("args",), ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
        (functools.partial(lambda rank, epochs, lr: 0, lr=0.2), (3,), ["RANK"]),
        (lambda rank, world_size: 0, (5, 6), []),
    ],
)
def test_the_parameters_of_tutorials_are_filled(fn, args, added):
    assert added_arguments(fn, args) == added


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
            return given, Epoch(0.5, [Step(1.0)]), Setting(0.1), hasattr(given, "__dict__")
    """)
    given = names.Step(2.0)
    [result] = launch(names.train, given, nproc=1)
    assert result == (given, names.Epoch(0.5, [names.Step(1.0)]), names.Setting(0.1), False)


# --- the ranks' surroundings ------------------------------------------------------------------------------------------


def test_the_environment_is_torchruns(tmp_path, monkeypatch):
    """Of a rank of torchrun that serves its store itself, but for the files, signals and threads of its agent."""
    monkeypatch.setenv("MASTER_PORT", "1")  # which torchrun overwrites
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    show = "import json, os; open('rank' + os.environ['RANK'], 'w').write(json.dumps(dict(os.environ)))"
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=2", *AT_ADDRESS]
    (tmp_path / "show.py").write_text(show)
    subprocess.run([*command, "show.py"], cwd=tmp_path, check=True, stderr=subprocess.DEVNULL)
    theirs = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    ours = launch(lambda: dict(os.environ), nproc=2)
    of_agent = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    of_terminal = {"COLUMNS", "LINES"}  # readline sets them, which only one side may have imported (Python 3.14)
    for own, other in zip(ours, theirs, strict=True):
        assert other.keys() - own.keys() - of_terminal == of_agent
        same = other.keys() - of_agent - of_terminal - {"MASTER_PORT"}
        assert {name: other[name] for name in same}.items() <= own.items()
        assert 1 << 10 < int(own["MASTER_PORT"]) == int(ours[0]["MASTER_PORT"])


def test_changes_of_the_kernels_environment_reach_the_ranks(monkeypatch):
    monkeypatch.setenv("PAGE", "old")
    monkeypatch.delenv("HOME")  # which the forkserver has had since its start
    assert launch(lambda: [*map(os.environ.get, ("PAGE", "HOME"))], nproc=1, env={"PAGE": "new"}) == [["new", None]]
    assert os.environ["PAGE"] == "old"


def test_threads_share_the_cores_and_follow_a_lower_limit():
    def threads(limit):
        return launch(torch.get_num_threads, nproc=2, env={"OMP_NUM_THREADS": limit})

    assert threads(limit="64") == [max(1, usable_cores() // 2)] * 2
    assert threads(limit="1,1") == [1, 1]  # a number for each nested level


def test_every_socket_of_the_ranks_is_on_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # the kernel's variable must not reach the ranks

    def sockets():
        dist.barrier()
        return [(socket.laddr.ip, socket.status) for socket in psutil.Process().net_connections(kind="inet")]

    for connections in launch(sockets, nproc=2):
        assert psutil.CONN_LISTEN in dict(map(reversed, connections))
        assert {address for address, _ in connections} <= {"127.0.0.1", "::1"}
    assert psutil.Process(forkserver._forkserver._forkserver_pid).net_connections(kind="inet") == []


@linux
def test_data_loader_workers_end_with_their_rank():
    def read():
        data = torch.utils.data.TensorDataset(torch.arange(64.0))
        loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, persistent_workers=True)
        return sum(batch.sum().item() for (batch,) in loader), len(psutil.Process().children(recursive=True))

    assert launch(read, nproc=2) == [(2016.0, 2)] * 2


# --- what cannot travel ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        (
            lambda: threading.Lock() if dist.get_rank() == 1 else 1,
            (),
            "rank 1 failed first: TypeError: the result, a lock, cannot be sent back (cannot pickle '_thread.lock' obj",
        ),
        (lambda: launch(print), (), "ranks 0-1 failed: helpers.ranks.launch.LaunchError: launch was called inside a"),
    ],
    ids=["result", "launch inside a rank"],
)
def test_what_cannot_travel_is_named(fn, args, message):
    assert str(failure(fn, *args, nproc=2)).startswith(message)


@pytest.mark.parametrize(
    ("args", "options", "text"),
    [
        ((threading.Lock().acquire,), {}, "the function acquire cannot be sent"),
        ((print, 1, threading.Lock()), {}, "argument 1, a lock, cannot be sent"),
        ((3,), {}, "launch needs a function, and got 3"),
        ((lambda x, args: 0, 1), {}, "missing a required argument: 'args'.\nPass them: launch(fn, x, args, nproc=4)"),
        ((print,), {"backend": "mpi"}, "backend='mpi' is not a backend of launch.\nUse 'gloo'"),
        ((print,), {"nproc": 0}, "nproc=0 is not a number of ranks between 1 and 64"),
        ((print,), {"timeout": float("nan")}, "timeout is a number of seconds above 0; it was nan"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(args, options, text):
    with pytest.raises(LaunchError) as refusal:
        launch(*args, **options)
    assert text in str(refusal.value)
