"""``launch``: what it returns, the ranks' environment, and what can be sent to ranks and back."""

import functools
import os
import signal
import socket
import sys
import threading
import time
from concurrent import futures
from multiprocessing import forkserver

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from launching import cell, failure, linux, nothing_left, warmed_up  # noqa: F401  (fixtures)

from helpers.ranks.launch import LaunchError, launch
from helpers.ranks.ports import hold_port

pytestmark = pytest.mark.ranks
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second

# --- results ----------------------------------------------------------------------------------------------------------


def test_ranks_form_one_gloo_group_and_results_come_in_rank_order():
    def late_first(x):
        dist.all_reduce(x)
        time.sleep(0.1 * (3 - dist.get_rank()))
        names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
        return x.item(), dist.get_backend(), dist.get_rank(), dist.get_world_size(), *map(os.environ.get, names)

    expected = [(8.0, "gloo", rank, 4, str(rank), str(rank), "4", "4") for rank in range(4)]
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
        torch.full((12_500_000,), 3.0),  # 50 MB
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


class Adder:
    def add(self, x=10):
        return x + dist.get_rank()

    __call__ = add


def closure(x):
    return lambda: x + dist.get_rank()


@pytest.mark.parametrize("kind", ["closure", "partial", "bound method", "callable object"])
def test_any_callable(kind):
    kinds = {"closure": closure(10), "bound method": Adder().add, "callable object": Adder()}
    assert launch(kinds.get(kind, functools.partial(Adder.add, Adder(), x=10)), nproc=2) == [10, 11]


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
    assert launch(os.getcwd, nproc=1) == [str(tmp_path)]
    (tmp_path / "mine_only.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    import mine_only

    assert launch(mine_only.answer, nproc=2) == [42, 42]


# --- the ranks' surroundings ------------------------------------------------------------------------------------------


def test_changes_of_the_kernels_environment_reach_the_ranks(monkeypatch):
    monkeypatch.setenv("GONE", "1")
    monkeypatch.setenv("PAGE", "old")
    assert launch(lambda: [*map(os.environ.get, ("PAGE", "GONE"))], nproc=1) == [["old", "1"]]
    monkeypatch.delenv("GONE")
    assert launch(lambda: [*map(os.environ.get, ("PAGE", "GONE"))], nproc=1, env={"PAGE": "new"}) == [["new", None]]
    assert os.environ["PAGE"] == "old"


@pytest.mark.parametrize(
    "nproc, limit, most", [(1, "", 99), (2, "", 99), (4, "", 99), (1, "1", 1), (1, "64", 99), (1, "1,1", 1)]
)
def test_threads_share_the_cores_and_follow_a_lower_limit(nproc, limit, most):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = launch(torch.get_num_threads, nproc=nproc, env={"OMP_NUM_THREADS": limit} if limit else None)
    assert threads == [max(1, min(most, cores // nproc))] * nproc


def test_random_numbers_differ_between_ranks_and_calls_but_torchs_do_not():
    def draw():
        import random

        return np.random.rand(), random.random(), torch.rand(1).item()

    numpys, pythons, torchs = zip(*launch(draw, nproc=2), *launch(draw, nproc=2), strict=True)
    assert len({*numpys, *pythons}) == 8 and len(set(torchs)) == 1


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
        with hold_port() as port, hold_port() as other, socket.socket() as stranger:
            with pytest.raises(OSError, match="Address already in use"):
                stranger.bind(("127.0.0.1", port))
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            store.set("key", "value")
            assert dist.TCPStore("127.0.0.1", port).get("key") == b"value" and store.port == port != other
        with socket.socket() as stranger:
            stranger.bind(("127.0.0.1", other))

    launch(hold, nproc=1)


@linux
@pytest.mark.parametrize("fails", [False, True])
def test_data_loader_workers_end_with_their_rank(fails):
    def read():
        data = torch.utils.data.TensorDataset(torch.arange(64.0))
        loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, persistent_workers=True)
        total = sum(batch.sum().item() for (batch,) in loader), len(psutil.Process().children())
        if fails:
            raise ValueError(total)
        return total

    assert str((2016.0, 2)) in (str(failure(read, nproc=2)) if fails else str(launch(read, nproc=2)))


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


class Trap:
    """An object whose unpickling calls ``function(*args)``."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        (
            lambda: threading.Lock() if dist.get_rank() == 1 else 1,
            (),
            "rank 1 failed first: TypeError: the result, a lock, cannot be sent back (cannot pickle '_thread.lock' obj",
        ),
        (print, (Trap(exec, "raise ValueError(1)"),), "ranks 0-1 failed: ValueError: 1"),
        (print, (Trap(__import__, "absent"),), "ranks 0-1 failed: ModuleNotFoundError: No module named 'absent'"),
        (lambda: launch(print), (), "ranks 0-1 failed: helpers.ranks.launch.LaunchError: launch was called inside a"),
    ],
    ids=["result", "argument that raises", "absent module", "launch inside a rank"],
)
def test_what_cannot_travel_is_named(fn, args, message):
    error = failure(fn, *args, nproc=2)
    assert str(error).startswith(message)
    assert "a lock" not in message or "Return tensors, arrays or plain objects" in error.failures[1]


def test_result_that_cannot_be_unpacked_here():
    source = f"import os\nif os.getpid() == {os.getpid()}: raise ValueError('cannot be unpacked')"
    with pytest.raises(ValueError, match="cannot be unpacked"):
        launch(lambda: Trap(exec, source), nproc=2)


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
        ((print,), {"nproc": 0}, "nproc=0 is not a number of ranks between 1 and 64"),
        ((print,), {"nproc": 65}, "torchrun"),
        ((print,), {"nproc": "4"}, "nproc='4' is not a number of ranks"),
        ((print,), {"nproc": True}, "nproc=True is not a number of ranks"),
        ((print,), {"timeout": 0}, "above 0; it was 0"),
        ((print,), {"timeout": "60"}, "it was '60'"),
        ((print,), {"timeout": float("nan")}, "it was nan"),
        ((print,), {"timeout": 1e9}, "it was 1000000000.0"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(args, options, text):
    with pytest.raises(LaunchError) as refusal:
        launch(*args, **options)
    message = str(refusal.value)
    assert text in message and len(message.splitlines()) == 2, message


def test_longest_timeout_works():
    assert launch(dist.get_rank, nproc=2, timeout=500_000) == [0, 1]


def test_errors_show_no_frames_of_the_launcher_in_ipython():
    error = failure(lambda: 1 / 0, nproc=1)
    lines = error._render_traceback_()
    assert lines[-1].startswith("RankError: rank 0 failed first: ZeroDivisionError")
    assert not any("helpers/" in line for line in lines)
    assert LaunchError("one\ntwo")._render_traceback_() == ["LaunchError: one\ntwo"]
