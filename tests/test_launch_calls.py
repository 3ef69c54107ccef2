"""``launch``: what it returns, the ranks' environment, and what can be sent to ranks and back."""

import errno
import functools
import os
import signal
import socket
import sys
import textwrap
import threading
import time
from concurrent import futures
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from launching import cell, failure, linux, nothing_left, warmed_up  # noqa: F401  (fixtures)

from helpers.ranks.launch import LaunchError, launch
from helpers.ranks.ports import hold_port

pytestmark = pytest.mark.ranks

# --- results ----------------------------------------------------------------------------------------------------------


def test_ranks_form_one_gloo_group_and_results_come_in_rank_order():
    def late_first(x):
        dist.all_reduce(x)
        time.sleep(0.1 * (3 - dist.get_rank()))
        names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
        return (
            x.item(),
            dist.get_backend(),
            dist.get_rank(),
            dist.get_world_size(),
            [os.environ[name] for name in names],
        )

    expected = [(8.0, "gloo", rank, 4, [str(rank), str(rank), "4", "4"]) for rank in range(4)]
    assert launch(late_first, torch.tensor(2.0)) == expected


@pytest.mark.parametrize("nproc", [1, 2])
def test_every_rank_is_a_fresh_child(nproc):
    first, second = launch(os.getpid, nproc=nproc), launch(os.getpid, nproc=nproc)
    assert len({os.getpid(), *first, *second}) == 1 + 2 * nproc


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.zeros(1)),
        torch.arange(10)[::3],
        torch.eye(3).to_sparse(),
        np.arange(5, dtype=np.int16),
        {"loss": 0.5, "history": [1, 2], "name": "α", "nothing": None},
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}",
)
def test_values_arrive_and_return_as_they_were(value):
    def back(x):
        return type(x), x

    for kind, result in launch(back, value, nproc=2):
        assert kind is type(value) is type(result)
        if isinstance(value, torch.Tensor):
            assert result.dtype == value.dtype and result.requires_grad == value.requires_grad
            assert torch.equal(result.to_dense(), value.to_dense())
        elif isinstance(value, np.ndarray):
            assert result.dtype == value.dtype and np.array_equal(result, value)
        else:
            assert result == value


def test_large_tensors_pass_without_shared_memory():
    def scale(x):
        return os.getpid(), x * dist.get_rank()

    x = torch.full((12_500_000,), 3.0)  # 50 MB
    for rank, (pid, result) in enumerate(launch(scale, x, nproc=2)):
        assert result.shape == x.shape and result[0] == result[-1] == 3 * rank
        assert not list(Path("/dev/shm").glob(f"*{pid}*"))


def test_several_small_tensors_do_not_share_storage():
    results = launch(lambda: torch.zeros(2), nproc=2)
    results[0] += 1
    assert results[1].tolist() == [0, 0]


def test_model_returns_with_its_weights():
    def train():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        model = torch.nn.parallel.DistributedDataParallel(model)
        model(torch.ones(2, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return model.module

    first, second = launch(train, nproc=2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_what_a_cell_defines_reaches_the_ranks():
    page = cell("""
        from dataclasses import dataclass

        scale = 3

        @dataclass
        class Result:
            rank: int
            total: float

        class Net(torch.nn.Module):
            def forward(self, x):
                return scale * x

        def work(net, result_type):
            return result_type(dist.get_rank(), net(torch.ones(2)).sum().item())
    """)
    results = launch(page.work, page.Net(), page.Result, nproc=2)
    assert results == [page.Result(0, 6.0), page.Result(1, 6.0)]


def closure(x):
    return lambda: x + dist.get_rank()


class Adder:
    def __init__(self, x):
        self.x = x

    def add(self, y=0):
        return self.x + y + dist.get_rank()

    __call__ = add


@pytest.mark.parametrize(
    "fn",
    [
        lambda: 10 + dist.get_rank(),
        closure(10),
        functools.partial(lambda a, b: a + b + dist.get_rank(), 4, b=6),
        Adder(10).add,
        Adder(10),
    ],
    ids=["lambda", "closure", "partial", "bound method", "callable object"],
)
def test_any_callable(fn):
    assert launch(fn, nproc=2) == [10, 11]


def names_modules_of_torch():
    """Functions that use what cloudpickle cannot send: torch's operators, and modules of torch with other types."""
    import torch._dynamo

    config, namespace, packet, overload = (
        torch._dynamo.config,
        torch.ops.aten,
        torch.ops.aten.add,
        torch.ops.aten.add.out,
    )

    def imports_it():
        import torch._dynamo.config as inside

        return inside is torch._dynamo.config

    x, out = torch.ones(1), torch.zeros(1)
    return {
        "torch.ops": lambda: torch.ops.aten.add(x, x),
        "torch.backends": lambda: torch.backends.cudnn.benchmark,
        "an import inside": imports_it,
        "a module of settings": lambda: config is torch._dynamo.config,
        "a namespace": lambda: namespace.add(x, x),
        "an operator": lambda: packet(x, x),
        "an overload": lambda: overload(x, x, out=out),
    }


@pytest.mark.parametrize("name", names_modules_of_torch())
def test_function_that_names_a_module_of_torch(name):
    fn = names_modules_of_torch()[name]
    assert launch(fn, nproc=2) == [fn()] * 2


def test_module_of_torch_comes_back():
    assert launch(lambda: (torch.ops, torch.backends, torch.ops.aten.add.Tensor), nproc=1) == [
        (torch.ops, torch.backends, torch.ops.aten.add.Tensor)
    ]


def test_ranks_have_the_callers_folder_and_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch(os.getcwd, nproc=1) == [str(tmp_path)]
    (tmp_path / "mine_only.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    import mine_only

    assert launch(mine_only.answer, nproc=2) == [42, 42]


# --- the ranks' surroundings ------------------------------------------------------------------------------------------


def test_changes_of_the_kernels_environment_reach_the_ranks(monkeypatch):
    def values():
        return os.environ.get("PAGE"), os.environ.get("GONE")

    monkeypatch.setenv("GONE", "1")
    monkeypatch.setenv("PAGE", "one")
    assert launch(values, nproc=1) == [("one", "1")]
    monkeypatch.delenv("GONE")
    assert launch(values, nproc=1, env={"PAGE": "two"}) == [("two", None)]
    assert os.environ["PAGE"] == "one"


def test_debug_level_asked_for_by_env_takes_effect():
    page = cell("""
        def mismatch():
            x = torch.ones(2)
            if dist.get_rank() == 0:
                dist.all_reduce(x)
            else:
                dist.broadcast(x, 0)
    """)
    error = failure(page.mismatch, nproc=2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert "ALLREDUCE" in str(error) and "BROADCAST" in str(error)


@pytest.mark.parametrize(
    "nproc, asked, most", [(1, "", 99), (2, "", 99), (4, "", 99), (1, "1", 1), (1, "64", 99), (1, "1,1", 1)]
)
def test_threads_share_the_cores_and_follow_a_lower_limit(nproc, asked, most):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = launch(torch.get_num_threads, nproc=nproc, env={"OMP_NUM_THREADS": asked} if asked else None)
    assert threads == [max(1, min(most, cores // nproc))] * nproc


def test_random_numbers_differ_between_ranks_and_calls_but_torchs_do_not():
    def draw():
        import random

        return np.random.rand(), random.random(), torch.rand(1).item()

    numpys, pythons, torchs = zip(*launch(draw, nproc=2), *launch(draw, nproc=2), strict=True)
    assert len({*numpys, *pythons}) == 8 and len(set(torchs)) == 1


def test_works_beside_the_kernels_own_group():
    from helpers.runtime.process_group import start_process_group, stop_process_group

    def group():
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item(), start_process_group()

    start_process_group()
    try:
        assert launch(group, nproc=2) == [(2.0, torch.device("cpu"))] * 2
        mine = torch.ones(1)
        dist.all_reduce(mine)
        assert mine.item() == 1.0 and dist.get_world_size() == 1
    finally:
        stop_process_group()


def test_two_calls_at_once_from_threads_do_not_meet():
    main = sys.modules["__main__"]

    def total(x):
        time.sleep(0.1)
        x = torch.tensor([x])
        dist.all_reduce(x)
        return x.item()

    with futures.ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda x: launch(total, x, nproc=2), [1, 10])) == [[2, 2], [20, 20]]
    assert sys.modules["__main__"] is main


def test_every_socket_of_the_ranks_is_on_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # the kernel's variable must not reach the ranks

    def sockets():
        dist.barrier()
        return [(socket.laddr.ip, socket.status) for socket in psutil.Process().net_connections(kind="inet")]

    for connections in launch(sockets, nproc=2):
        assert psutil.CONN_LISTEN in dict(map(reversed, connections))
        assert {address for address, _ in connections} <= {"127.0.0.1", "::1"}
    assert psutil.Process(forkserver._forkserver._forkserver_pid).net_connections(kind="inet") == []


def test_a_held_port_is_for_a_store_alone_and_is_given_back():
    def hold():  # in a rank, where a store's sockets and threads end with it
        with hold_port() as port, hold_port() as other:
            assert port != other
            with socket.socket() as stranger, pytest.raises(OSError) as refusal:
                stranger.bind(("127.0.0.1", port))
            assert refusal.value.errno == errno.EADDRINUSE
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            store.set("key", "value")
            assert store.port == port and dist.TCPStore("127.0.0.1", port).get("key") == b"value"
        with socket.socket() as stranger:
            stranger.bind(("127.0.0.1", other))

    launch(hold, nproc=1)


@linux
@pytest.mark.parametrize("fails", [False, True])
def test_data_loader_workers_end_with_their_rank(fails):
    def read(fails):
        data = torch.utils.data.TensorDataset(torch.arange(64.0))
        loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, persistent_workers=True)
        total = sum(batch.sum().item() for (batch,) in loader)
        workers = len(psutil.Process().children())
        if fails:
            raise ValueError(f"{workers} workers")
        return total, workers

    if fails:
        assert "2 workers" in str(failure(read, True, nproc=2))
    else:
        assert launch(read, False, nproc=2) == [(2016.0, 2)] * 2


@linux
@pytest.mark.parametrize("end", ["kill", "hang"])
def test_subprocesses_end_with_their_rank(end):
    page = cell("""
        def start(end):
            import subprocess
            subprocess.Popen(["sleep", "1000"])
            if end == "kill" and dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
            time.sleep(1000)
    """)
    failure(page.start, end, nproc=2, timeout=600 if end == "kill" else 1.5)


# --- what cannot travel ----------------------------------------------------------------------------------------------


CANNOT_TRAVEL = {
    "a result": (
        "def step(): return threading.Lock() if dist.get_rank() == 1 else 1",
        "rank 1 failed first: TypeError: the result, a lock, cannot be sent back (cannot pickle '_thread.lock' object)",
    ),
    "an argument that raises": (
        """
        def explode():
            raise ValueError("cannot be unpacked")

        class Trap:
            def __reduce__(self):
                return explode, ()
        """,
        "ranks 0-1 failed: ValueError: cannot be unpacked",
    ),
    "an absent module": (
        """
        class Trap:
            def __reduce__(self):
                return __import__, ("no_such_module",)
        """,
        "ranks 0-1 failed: ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "launch inside a rank": (
        """
        def step():
            from helpers.ranks.launch import launch
            launch(print)
        """,
        "ranks 0-1 failed: helpers.ranks.launch.LaunchError: launch was called inside a rank",
    ),
}


@pytest.mark.parametrize("what", CANNOT_TRAVEL)
def test_what_cannot_travel_is_named(what):
    source, message = CANNOT_TRAVEL[what]
    page = cell(f"import threading\n{textwrap.dedent(source)}")
    error = failure(page.step, nproc=2) if hasattr(page, "step") else failure(print, page.Trap(), nproc=2)
    assert str(error).startswith(message)
    assert what != "a result" or "Return tensors, arrays or plain objects" in error.failures[1]


def test_result_that_cannot_be_unpacked_here():
    page = cell("""
        def explode(pid):
            if os.getpid() == pid:
                raise ValueError("cannot be unpacked")

        class Trap:
            def __init__(self, pid):
                self.pid = pid
            def __reduce__(self):
                return explode, (self.pid,)

        def step(pid):
            return Trap(pid)
    """)
    with pytest.raises(ValueError, match="cannot be unpacked"):
        launch(page.step, os.getpid(), nproc=2)


@pytest.mark.parametrize(
    "end, message",
    [
        (signal.SIGKILL, "rank 1 died first: killed by SIGKILL"),
        (signal.SIGSTOP, "1 of 2 ranks still ran after timeout=2 s:"),
    ],
)
def test_rank_that_ends_or_stops_while_it_writes_its_result(end, message):
    """The file has 1000 of 2000 bytes, and a child of the rank keeps the rank's end of the pipe open."""
    page = cell("""
        def step(end):
            import resource

            if dist.get_rank() == 1:
                if os.fork() == 0:
                    time.sleep(1000)
                signal.signal(signal.SIGXFSZ, lambda *_: os.kill(os.getpid(), end))
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
                return bytes(2000)
    """)
    error = failure(page.step, end, nproc=2, timeout=2 if end == signal.SIGSTOP else 600)
    assert str(error).startswith(message)


@pytest.mark.parametrize(
    "args, options, text",
    [
        ((closure(threading.Lock()),), {}, "the function <lambda> cannot be sent"),
        ((print, 1, threading.Lock()), {}, "argument 1, a lock, cannot be sent"),
        ((3,), {}, "launch needs a function, and got 3"),
        ((None,), {}, "Pass it uncalled"),
        ((print,), {"nproc": 0}, "nproc=0 is not between 1 and 64"),
        ((print,), {"nproc": -1}, "nproc=-1 is not between 1 and 64"),
        ((print,), {"nproc": 65}, "torchrun"),
        ((print,), {"nproc": "4"}, "an int; it was '4'"),
        ((print,), {"nproc": 2.0}, "an int; it was 2.0"),
        ((print,), {"nproc": True}, "an int; it was True"),
        ((print,), {"nproc": None}, "an int; it was None"),
        ((print,), {"timeout": 0}, "above 0; it was 0"),
        ((print,), {"timeout": -1}, "above 0; it was -1"),
        ((print,), {"timeout": None}, "it was None"),
        ((print,), {"timeout": "60"}, "it was '60'"),
        ((print,), {"timeout": float("nan")}, "it was nan"),
        ((print,), {"timeout": float("inf")}, "it was inf"),
        ((print,), {"timeout": 1e9}, "it was 1000000000.0"),
        ((print,), {"env": {"A": 1}}, "env maps names to strings"),
        ((print,), {"env": {1: "A"}}, "env maps names to strings"),
        ((print,), {"env": ["A=1"]}, "env maps names to strings"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(args, options, text):
    with pytest.raises(LaunchError) as caught:
        launch(*args, **options)
    message = str(caught.value)
    assert text in message and len(message.splitlines()) == 2, message


def test_longest_timeout_works():
    assert launch(dist.get_rank, nproc=2, timeout=500_000) == [0, 1]


def test_errors_show_no_frames_of_the_launcher_in_ipython():
    error = failure(lambda: 1 / 0, nproc=1)
    shown = error._render_traceback_()
    assert shown[-1].startswith("RankError: rank 0 failed first: ZeroDivisionError")
    assert not any("helpers/" in line for line in shown)
    assert LaunchError("one\ntwo")._render_traceback_() == ["LaunchError: one\ntwo"]
