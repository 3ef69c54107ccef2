"""``launch``: what it returns, what it says about every way to fail, and that it leaves nothing behind."""

import contextlib
import functools
import gc
import itertools
import linecache
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import SimpleNamespace

import leftovers
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from helpers.ranks import launch as launcher
from helpers.ranks.launch import LaunchError, RankError, fold, launch

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc, cgroups or fork")
cells = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def warmed_up():
    """The forkserver runs, and this process has used OpenMP, as a notebook's kernel has."""
    torch.set_num_threads(2)
    torch.ones(512, 512) @ torch.ones(512, 512)
    launch(lambda: torch.ones(512, 512).sum(), nproc=1)


@pytest.fixture(autouse=True)
def nothing_left(request, warmed_up):
    """Every test leaves this process as it was; a kernel's test counts what the kernel leaves."""
    with contextlib.nullcontext() if "kernel" in request.fixturenames else leftovers.unchanged():
        yield


def cell(source):
    """The names that a notebook has after a cell with this source, in ``__main__`` as there."""
    source, file = textwrap.dedent(source).lstrip(), f"/somewhere/ipykernel_12345/{next(cells)}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = {"__name__": "__main__"}
    exec("import os, signal, sys, time\nimport torch\nimport torch.distributed as dist", names)
    exec(compile(source, file, "exec"), names)
    return SimpleNamespace(**names)


def without_carets(story):
    """A traceback without the lines that underline its code: each version of Python has its own."""
    return re.sub(r"^ *[~^]+\n", "", story, flags=re.M)


def failure(fn, *args, **options):
    """The RankError of a launch that must fail, well before its timeout where none is given."""
    start, options = time.monotonic(), {"timeout": 60, **options}
    with pytest.raises(RankError) as caught:
        launch(fn, *args, **options)
    if options["timeout"] == 60:
        assert time.monotonic() - start < 10
    return caught.value


# --- results ----------------------------------------------------------------------------------------------------------


def test_results_come_in_rank_order():
    def late_first():
        time.sleep(0.1 * (3 - dist.get_rank()))
        return dist.get_rank(), os.environ["RANK"], os.environ["LOCAL_RANK"]

    assert launch(late_first) == [(k, str(k), str(k)) for k in range(4)]


def test_ranks_form_one_gloo_group():
    def group(x):
        dist.all_reduce(x)
        names = "WORLD_SIZE", "LOCAL_WORLD_SIZE"
        return x.item(), dist.get_backend(), dist.get_world_size(), [os.environ[name] for name in names]

    assert launch(group, torch.tensor(2.0), nproc=3) == [(6.0, "gloo", 3, ["3", "3"])] * 3


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
    """Functions that name what cloudpickle refuses: modules of torch with a type of their own, and its operators."""
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


def test_module_function_without_arguments():
    assert launch(dist.get_rank, nproc=2) == [0, 1]


def test_ranks_work_in_the_callers_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch(os.getcwd, nproc=1) == [str(tmp_path)]


def test_modules_of_the_callers_path_are_found(tmp_path, monkeypatch):
    (tmp_path / "mine_only.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    import mine_only

    assert launch(mine_only.answer, nproc=2) == [42, 42]


# --- the ranks' surroundings ------------------------------------------------------------------------------------------


def test_changes_of_the_kernels_environment_reach_the_ranks(monkeypatch):
    def seen():
        return os.environ.get("PAGE"), os.environ.get("GONE")

    monkeypatch.setenv("GONE", "1")
    monkeypatch.setenv("PAGE", "one")
    assert launch(seen, nproc=1) == [("one", "1")]
    monkeypatch.delenv("GONE")
    assert launch(seen, nproc=1, env={"PAGE": "two"}) == [("two", None)]
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


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_threads_share_the_cores(nproc):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert launch(torch.get_num_threads, nproc=nproc) == [max(1, cores // nproc)] * nproc


@pytest.mark.parametrize("asked, given", [("1", 1), ("64", None), ("1,1", 1)])
def test_threads_follow_a_lower_limit(asked, given):
    full = launch(torch.get_num_threads, nproc=1)
    assert launch(torch.get_num_threads, nproc=1, env={"OMP_NUM_THREADS": asked}) == ([given] if given else full)


def test_numpy_and_random_differ_between_ranks_and_calls():
    def draw():
        import random

        return np.random.rand(), random.random()

    draws = launch(draw, nproc=2) + launch(draw, nproc=2)
    assert len({number for pair in draws for number in pair}) == 8


def test_torch_starts_from_the_same_seed_everywhere():
    def draw():
        return torch.rand(1).item()

    assert len(set(launch(draw, nproc=2) + launch(draw, nproc=2))) == 1


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


def test_works_from_a_thread():
    results = []
    thread = threading.Thread(target=lambda: results.extend(launch(dist.get_rank, nproc=2)))
    thread.start()
    thread.join()
    assert results == [0, 1]


def test_two_calls_at_once_do_not_meet():
    main = sys.modules["__main__"]

    def total(x):
        time.sleep(0.1)
        x = torch.tensor([x])
        dist.all_reduce(x)
        return x.item()

    results = {}
    threads = [threading.Thread(target=lambda n=n: results.update({n: launch(total, n, nproc=2)})) for n in (1, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [2, 2], 10: [20, 20]}
    assert sys.modules["__main__"] is main


def test_every_socket_of_the_ranks_is_on_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # the kernel's choice is for other things

    def sockets():
        dist.barrier()
        return [(one.laddr.ip, one.status) for one in psutil.Process().net_connections(kind="inet")]

    for found in launch(sockets, nproc=2):
        assert psutil.CONN_LISTEN in dict(map(reversed, found))
        assert {address for address, _ in found} <= {"127.0.0.1", "::1"}


def test_forkserver_itself_opens_no_internet_socket():
    server = psutil.Process(forkserver._forkserver._forkserver_pid)
    assert server.net_connections(kind="inet") == []


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
    failure(page.start, end, nproc=2, timeout=60 if end == "kill" else 1.5)


# --- output -----------------------------------------------------------------------------------------------------------


def test_output_comes_in_rank_order_and_folded(capsys):
    def talk():
        rank = dist.get_rank()
        time.sleep(0.05 * (3 - rank))
        print("same on all")
        print(f"I am {rank}")
        print("on stderr", file=sys.stderr)
        os.write(1, b"from C\n")
        print("no newline at the end", end="")

    launch(talk)
    assert capsys.readouterr().out.splitlines() == [
        "[ranks 0-3] same on all",
        "[rank 0] I am 0",
        "[rank 1] I am 1",
        "[rank 2] I am 2",
        "[rank 3] I am 3",
        "[ranks 0-3] on stderr",
        "[ranks 0-3] from C",
        "[ranks 0-3] no newline at the end",
    ]


def test_output_of_subprocesses_is_shown(capsys):
    launch(lambda: subprocess.run(["echo", "from a child"], check=True) and None, nproc=2)
    assert capsys.readouterr().out == "[ranks 0-1] from a child\n"


def test_nothing_printed_shows_nothing(capsys):
    launch(lambda: None, nproc=2)
    assert capsys.readouterr() == ("", "")


def test_output_before_a_failure_is_shown(capsys):
    def talk_and_die():
        print("last words of", dist.get_rank(), end="")
        sys.stdout.flush()
        dist.barrier()
        os._exit(3) if dist.get_rank() else time.sleep(100)

    failure(talk_and_die, nproc=2)
    assert capsys.readouterr().out == "[rank 0] last words of 0\n[rank 1] last words of 1\n"


def test_ten_megabytes_of_output(capsys):
    def flood():
        for line in range(20_000):
            print(f"{line} {dist.get_rank() if line % 2 else ''} {'x' * 240}")

    start = time.monotonic()
    launch(flood, nproc=2)
    assert time.monotonic() - start < 20
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 30_000 and lines[-1].startswith("[rank 1] 19999 1 xxx")


def test_unicode_and_broken_bytes(capsys):
    def talk():
        print("größer → 火 🙂")
        os.write(1, b"\xff\xfe broken\n")

    launch(talk, nproc=2)
    assert capsys.readouterr().out == "[ranks 0-1] größer → 火 🙂\n[ranks 0-1] \ufffd\ufffd broken\n"


@pytest.mark.parametrize(
    "given, shown",
    [
        ("/var/x/ipykernel_77/123.py:3: UserWarning: careful\n", "notebook cell:3: UserWarning: careful\n"),
        ('  File "/var/x/ipykernel_77/123.py", line 3\n', '  File "notebook cell", line 3\n'),
        ("(/ipykernel_77/1.py) and ipykernel_7/2.py", "(notebook cell) and notebook cell"),
        ("[rank0]:[W1120 23:56:46.832225602 reducer.cpp:1529] Warning", "[W reducer.cpp:1529] Warning"),
        ("a\n[E1120 23:56:46.83 gloo.cpp:67] lost", "a\n[E gloo.cpp:67] lost"),
        ("epoch 1: 0.93 [done]", "epoch 1: 0.93 [done]"),
        ("x" * 1_000_000, "x" * 1_000_000),
    ],
    ids=["warning", "traceback", "brackets", "torch", "torch without rank", "plain", "one long line"],
)
def test_what_differs_from_run_to_run_is_not_shown(given, shown):
    assert launcher.tidy(given) == shown


@pytest.mark.parametrize(
    "outputs, lines",
    [
        ([], []),
        (["", ""], []),
        (["a\n", "a\n"], ["[ranks 0-1] a"]),
        (["a\n", "b\n"], ["[rank 0] a", "[rank 1] b"]),
        (["a\nx\nb\n", "a\ny\nb\n"], ["[ranks 0-1] a", "[rank 0] x", "[rank 1] y", "[ranks 0-1] b"]),
        (["a\nb\n", "b\na\n"], ["[rank 0] a", "[ranks 0-1] b", "[rank 1] a"]),
        (["a\na\nb\n", "a\nb\n"], ["[ranks 0-1] a", "[rank 0] a", "[ranks 0-1] b"]),
        (["same", "same", "other", "same"], ["[ranks 0, 1, 3] same", "[rank 2] other"]),
        (["\n", "\n"], ["[ranks 0-1]"]),
        (["a\n\n\nb", "a\nb"], ["[ranks 0-1] a", "[rank 0]", "[rank 0]", "[ranks 0-1] b"]),
        (["only rank zero\n", "", ""], ["[rank 0] only rank zero"]),
        (["", "late\n"], ["[rank 1] late"]),
        (["  indented\n", "  indented\n"], ["[ranks 0-1]   indented"]),
        (["a\x0cb\u2028c\n"], ["[rank 0] a\x0cb\u2028c"]),
    ],
)
def test_fold(outputs, lines):
    assert list(fold(outputs)) == lines


def test_fold_keeps_every_line_and_each_ranks_order():
    words = ["a", "b", "c", ""]
    for seed in range(200):
        random = np.random.default_rng(seed)
        texts = [[words[i] for i in random.integers(0, 4, random.integers(0, 8))] for _ in range(3)]
        seen = [[] for _ in texts]
        for line in fold(["".join(f"{word}\n" for word in text) for text in texts]):
            who, word = re.fullmatch(r"\[ranks? ([\d, -]+)\] ?(.*)", line).groups()
            first, _, last = who.partition("-")
            for rank in range(int(first), int(last) + 1) if last else map(int, who.split(", ")):
                seen[rank].append(word)
        assert seen == texts, seed


# --- failures ---------------------------------------------------------------------------------------------------------


def failing(how):
    """A function whose rank 1 runs the statement ``how`` while its peers wait in a collective."""
    return cell(f"""
        def step():
            x = torch.ones(1)
            dist.all_reduce(x)
            if dist.get_rank() == 1:
                {how}
            dist.all_reduce(x)
            time.sleep(100)
    """).step


@pytest.mark.parametrize("nproc", [2, 4])
def test_rank_that_raises_is_named_with_its_own_line(nproc):
    page = cell("""
        def check(batch):
            if batch.sum() > 1:
                raise ValueError("too many samples")

        def step():
            x = torch.ones(1)
            if dist.get_rank() == 1:
                check(torch.ones(3))
            dist.all_reduce(x)
    """)
    error = failure(page.step, nproc=nproc)
    assert error.rank == 1 and list(error.failures) == [1]
    assert str(error) == (
        'rank 1 failed first: ValueError: too many samples\n  at line 3 of check: raise ValueError("too many samples")'
    )
    assert without_carets(error.failures[1]) == textwrap.dedent("""\
        Traceback (most recent call last):
          File "notebook cell", line 8, in step
            check(torch.ones(3))
          File "notebook cell", line 3, in check
            raise ValueError("too many samples")
        ValueError: too many samples
    """)


DEATHS = {
    "os._exit(3)": "ended by itself with exit code 3",
    "os._exit(0)": "ended by itself with exit code 0",
    "os.kill(os.getpid(), signal.SIGKILL)": "killed by SIGKILL (by another process)",
    "os.kill(os.getpid(), signal.SIGSEGV)": "killed by SIGSEGV",
    "os.abort()": "killed by SIGABRT",
    "os.kill(os.getpid(), signal.SIGTERM)": "killed by SIGTERM",
}


@pytest.mark.parametrize("how", DEATHS)
def test_rank_that_dies_is_named_at_once(how):
    error = failure(failing(how), nproc=3)
    assert (error.rank, str(error)) == (1, f"rank 1 died first: {DEATHS[how]}")


def test_killed_rank_is_told_without_a_wait_for_peers(monkeypatch):
    monkeypatch.setattr(launcher, "PEERS_WITHIN", 1000)
    monkeypatch.setattr(launcher, "LATE_WITHIN", 1000)

    def step():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    assert str(failure(step, nproc=3)).startswith("rank 1 died first: killed by SIGKILL")


@linux
def test_last_lines_of_a_killed_ranks_peers_are_shown(monkeypatch, capsys):
    """A peer that still works when a rank is killed, as on a loaded machine, gets to its next wait."""
    monkeypatch.setattr(launcher, "PEERS_WITHIN", 1000)
    page = cell("""
        def step():
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            end = time.monotonic() + 1
            while time.monotonic() < end:
                pass
            print("a line after the kill")
            time.sleep(1000)
    """)
    assert failure(page.step, nproc=2).rank == 1
    assert capsys.readouterr().out == "[rank 0] a line after the kill\n"


@pytest.mark.parametrize("how", ["sys.exit(3)", "sys.exit()", "sys.exit('no data')"])
def test_sys_exit_is_a_failure(how):
    error = failure(failing(how), nproc=2)
    assert error.rank == 1 and "SystemExit" in str(error)


@pytest.mark.parametrize(
    "raise_, text",
    [
        ("raise MemoryError", "MemoryError"),
        ("bytearray(1 << 60)", "MemoryError"),
        ("torch.empty(1 << 55)", "RuntimeError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("f = lambda: f()\n            f()", "RecursionError"),
        ("raise Odd('from the notebook')", "Odd: from the notebook"),
        ("raise Unprintable", "Unprintable"),
        ("raise Unpicklable(lambda: 0)", "Unpicklable"),
        ("raise ExceptionGroup('two', [ValueError('one'), Odd('other')])", "two (2 sub-exceptions)"),
        ("from torch.distributed.checkpoint import CheckpointException as C; raise C('lost', {})", "CheckpointExcept"),
    ],
)
def test_every_exception_is_told(raise_, text):
    page = cell(f"""
        class Odd(Exception):
            pass

        class Unprintable(Exception):
            def __str__(self):
                raise RuntimeError("no text")

        class Unpicklable(Exception):
            pass

        def step():
            if dist.get_rank() == 1:
                {raise_.replace("            ", "                ")}
            dist.barrier()
    """)
    error = failure(page.step, nproc=2)
    assert error.rank == 1 and text in str(error)
    assert "notebook cell" in error.failures[1] and "_rank.py" not in error.failures[1]


def test_cause_of_an_exception_is_told_too():
    page = cell("""
        def step():
            try:
                {}["key"]
            except KeyError as error:
                raise ValueError("no such key") from error
    """)
    error = failure(page.step, nproc=2)
    assert "KeyError: 'key'" in error.failures[0] and "direct cause" in error.failures[0]


@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(1)", "1 / 0"])
def test_cause_is_named_and_not_the_echo(nproc, how):
    """The peers are inside the collective when the rank goes, so that they report lost connections."""
    page = cell("""
        def step(how):
            x = torch.ones(200_000)
            for number in range(1000):
                if dist.get_rank() == 1 and number == 5:
                    exec(how)
                dist.all_reduce(x)
    """)
    for _ in range(3):
        error = failure(page.step, how, nproc=nproc)
        assert error.rank == 1, error.failures


def test_cause_that_comes_after_its_echo(tmp_path):
    """Rank 1 closes its connections, waits until its peer has failed of that, and then tells why."""
    page = cell("""
        def step(echo):
            x = torch.ones(1)
            dist.all_reduce(x)
            if dist.get_rank() == 1:
                dist.destroy_process_group()
                while not echo.exists():
                    time.sleep(0.001)
                raise KeyError("the cause")
            try:
                dist.all_reduce(x)
            except RuntimeError as error:
                echo.touch()
                raise ValueError("the reader's own words") from error
    """)
    error = failure(page.step, tmp_path / "echo", nproc=2)
    assert str(error).startswith("rank 1 failed first: KeyError: 'the cause'")
    assert "Connection" in error.failures[0] and "own words" in error.failures[0]


def test_first_of_two_failures_is_named():
    page = cell("""
        def step():
            dist.barrier()
            if dist.get_rank() == 0:
                time.sleep(0.15)
            raise ValueError(f"from {dist.get_rank()}")
    """)
    assert "from 1" in str(failure(page.step, nproc=2))


def one_after_the_other():
    """A page whose step fails on both of two ranks, on rank 1 after ``do(seconds)``."""
    return cell("""
        def step(do, seconds):
            dist.barrier()
            if dist.get_rank() == 1:
                do(seconds)
            print("here")
            raise ValueError("no data")

        def work(seconds):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                pass
    """)


@linux
def test_late_peer_that_fails_in_the_same_way_is_named_too(capsys):
    """A loaded machine, as a rank sees it: a peer that still works is waited for."""
    page = one_after_the_other()
    assert str(failure(page.step, page.work, 0.8, nproc=2)).startswith("ranks 0-1 failed: ValueError: no data")
    assert capsys.readouterr().out == "[ranks 0-1] here\n"


@pytest.mark.parametrize("do", ["sleep", "work"])
def test_peer_that_sleeps_or_never_ends_its_work_does_not_hide_a_failure(do):
    page = one_after_the_other()
    error = failure(page.step, {"sleep": time.sleep, "work": page.work}[do], 10_000, nproc=2, timeout=10_000)
    assert str(error).startswith("rank 0 failed first: ValueError: no data")


def memory_group():
    """A folder of this process's memory cgroup where a smaller one can be made, or None."""
    for line in Path("/proc/self/cgroup").read_text().splitlines() if sys.platform == "linux" else ():
        _, kinds, path = line.split(":", 2)
        for root in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
            group = Path(root + path) / f"world-size-one-{os.getpid()}"
            with contextlib.suppress(OSError):
                group.mkdir()
                for limit in ("memory.limit_in_bytes", "memory.max"):
                    if (group / limit).exists():
                        (group / limit).write_text(str(64 << 20))
                        return group
            with contextlib.suppress(OSError):
                group.rmdir()
    return None


def test_real_end_of_memory_is_named():
    if not (group := memory_group()):
        pytest.skip("no memory cgroup can be made here: needs root on Linux (the wording has a test of its own)")
    page = cell("""
        def fill(group):
            dist.barrier()
            if dist.get_rank() == 1:
                (group / "cgroup.procs").write_text(str(os.getpid()))
                torch.ones(100_000_000)
            dist.barrier()
    """)
    try:
        error = failure(page.fill, group, nproc=2)
    finally:
        leftovers.soon(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
    assert str(error) == ("rank 1 died first: killed by SIGKILL (the system's out-of-memory killer: use less memory)")


def test_end_of_memory_is_worded(monkeypatch):
    counts = itertools.count()
    monkeypatch.setattr(launcher, "count_oom_kills", lambda: next(counts))
    error = failure(lambda: os.kill(os.getpid(), signal.SIGKILL), nproc=1)
    assert "out-of-memory killer: use less memory" in str(error)


# --- hangs ------------------------------------------------------------------------------------------------------------


def test_hang_names_each_ranks_line():
    page = cell("""
        def step():
            x = torch.ones(1)
            if dist.get_rank() == 0:
                return "done"
            if dist.get_rank() == 1:
                while True:
                    pass
            if dist.get_rank() == 2:
                time.sleep(1000)
            dist.all_reduce(x)
    """)
    start = time.monotonic()
    error = failure(page.step, nproc=5, timeout=1)
    assert time.monotonic() - start < 8
    first, *lines = str(error).splitlines()
    assert first == "4 of 5 ranks still ran after timeout=1 s:"
    assert lines[0] == "  rank 0: finished"
    assert lines[1] in ("  rank 1: at line 6 of step: while True:", "  rank 1: at line 7 of step: pass")
    assert lines[2:] == [
        "  rank 2: at line 9 of step: time.sleep(1000)",
        "  ranks 3-4: at line 10 of step: dist.all_reduce(x)",
    ]
    assert error.rank is None and sorted(error.failures) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "hang",
    [
        "lock.acquire()",
        "threading.Event().wait()",
        "dist.recv(torch.ones(1), 1 - dist.get_rank())",
        "dist.barrier() if dist.get_rank() else time.sleep(99)",
        "sum(range(10**12))",
        "threading.Thread(target=time.sleep, args=(99,)).start() or time.sleep(99)",
        "signal.pause()",
    ],
)
def test_hang_of_any_kind_ends_at_the_timeout(hang):
    page = cell(f"""
        import threading

        def step():
            lock = threading.Lock()
            lock.acquire()
            {hang}
    """)
    error = failure(page.step, nproc=2, timeout=1)
    assert str(error).startswith("2 of 2 ranks still ran after timeout=1 s:")
    assert "line 6 of step" in str(error)


def test_hang_before_the_function_is_told():
    page = cell("""
        class Slow:
            def __reduce__(self):
                return time.sleep, (100,)
    """)
    error = failure(print, page.Slow(), nproc=2, timeout=1)
    assert "2 of 2 ranks still ran" in str(error)


@pytest.mark.parametrize("hang", ["time.sleep(99)", "sum(range(10**12))"])
def test_every_signal_is_the_readers(hang, capsys):
    """A rank with handlers of its own, or with all signals blocked, is told with its line; and it gets no signal."""
    page = cell(f"""
        NUMBERS = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGQUIT

        def step():
            for number in NUMBERS:
                assert signal.signal(number, lambda *_: os.write(1, b"a signal")) == signal.SIG_DFL
            if dist.get_rank() == 1:
                signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
            {hang}
    """)
    assert str(failure(page.step, nproc=2, timeout=1)) == (
        f"2 of 2 ranks still ran after timeout=1 s:\n  ranks 0-1: at line 8 of step: {hang}"
    )
    assert capsys.readouterr().out == ""


def test_rank_that_ignores_signals_is_ended():
    def stubborn():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(1000)

    assert "2 of 2 ranks still ran" in str(failure(stubborn, nproc=2, timeout=1))


def test_stopped_rank_is_ended():
    def stop():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    assert "2 of 2 ranks still ran" in str(failure(stop, nproc=2, timeout=1))


def test_rank_that_tells_its_line_late_is_waited_for():
    """It is stopped when the time is over, and goes on a little later."""

    def stop():
        if dist.get_rank() == 1:
            subprocess.Popen(["sh", "-c", f"sleep 2.3; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    message = str(failure(stop, nproc=2, timeout=2))
    assert message.startswith("2 of 2 ranks still ran after timeout=2 s:")
    assert "rank 1: at line" in message or "ranks 0-1: at line" in message
    assert "no line" not in message


# --- what cannot travel ----------------------------------------------------------------------------------------------


def refused(*args, **options):
    """The text of the LaunchError; nothing may have been started for it."""
    with pytest.raises(LaunchError) as caught:
        launch(*args, **options)
    text = str(caught.value)
    assert len(text.splitlines()) == 2, text
    return text


def test_function_that_cannot_be_sent():
    lock = threading.Lock()
    assert "the function <lambda> cannot be sent" in refused(lambda: lock)


def test_argument_that_cannot_be_sent():
    assert "argument 1, a lock, cannot be sent" in refused(print, 1, threading.Lock()).replace("_thread.", "")


def test_result_that_cannot_be_sent_back():
    page = cell("""
        import threading

        def step():
            return threading.Lock() if dist.get_rank() == 1 else 1
    """)
    error = failure(page.step, nproc=2)
    assert str(error) == (
        "rank 1 failed first: TypeError: the result, a lock, cannot be sent back (cannot pickle '_thread.lock' object)."
    )
    assert "Return tensors, arrays or plain objects" in error.failures[1]


def test_argument_that_cannot_be_unpacked_in_the_rank():
    page = cell("""
        def explode():
            raise ValueError("cannot be unpacked")

        class Trap:
            def __reduce__(self):
                return explode, ()
    """)
    error = failure(print, page.Trap(), nproc=2)
    assert "ValueError: cannot be unpacked" in str(error)


def test_module_that_the_ranks_cannot_import():
    page = cell("""
        class Absent:
            def __reduce__(self):
                return __import__, ("no_such_module",)
    """)
    assert "No module named 'no_such_module'" in str(failure(print, page.Absent(), nproc=2))


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
    "end, told",
    [
        (signal.SIGKILL, "rank 1 died first: killed by SIGKILL"),
        (signal.SIGSTOP, "1 of 2 ranks still ran after timeout=2 s:"),
    ],
)
def test_rank_that_ends_or_stops_while_it_writes_its_result(end, told):
    """The file holds 1000 bytes of 2000, and a child of the rank keeps the rank's end of the pipe open."""
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
    start = time.monotonic()
    error = failure(page.step, end, nproc=2, timeout=2 if end == signal.SIGSTOP else 60)
    assert str(error).startswith(told)
    assert time.monotonic() - start < 10


def test_launch_inside_a_rank():
    def nested():
        from helpers.ranks.launch import launch

        return launch(print)

    assert "launch was called inside a rank" in str(failure(nested, nproc=1))


@pytest.mark.parametrize(
    "args, options, text",
    [
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
def test_wrong_arguments_are_refused(args, options, text):
    assert text in refused(*args, **options)


def test_longest_timeout_works():
    assert launch(dist.get_rank, nproc=2, timeout=500_000) == [0, 1]


def test_errors_show_no_frames_of_the_launcher_in_ipython():
    error = failure(lambda: 1 / 0, nproc=1)
    shown = error._render_traceback_()
    assert shown[-1].startswith("RankError: rank 0 failed first: ZeroDivisionError")
    assert not any("helpers/" in line for line in shown)
    assert LaunchError("one\ntwo")._render_traceback_() == ["LaunchError: one\ntwo"]


# --- nothing is left --------------------------------------------------------------------------------------------------


def test_fifty_calls_leave_this_process_as_it_was():
    def step():
        x = torch.ones(100_000)
        dist.all_reduce(x)
        return x

    def grown():
        gc.collect()
        mine = psutil.Process()
        server = psutil.Process(forkserver._forkserver._forkserver_pid)
        return mine.num_fds(), mine.num_threads(), server.num_fds(), mine.memory_info().rss, server.memory_info().rss

    for _ in range(5):
        launch(step, nproc=2)
    *before, mine, server = grown()
    for _ in range(50):
        launch(step, nproc=2)
    *after, mine_after, server_after = grown()
    assert after == before
    assert mine_after - mine < 8e6 and server_after - server < 8e6  # bytes


def test_failed_calls_leave_no_traceback_cycle_that_keeps_processes():
    before = psutil.Process().num_fds()
    for _ in range(5):
        with pytest.raises(RankError):
            launch(lambda: 1 / 0, nproc=2)
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("victim", ["forkserver", "resource tracker"])
def test_helper_process_that_was_killed_between_calls(victim):
    pid = forkserver._forkserver._forkserver_pid
    if victim == "resource tracker":
        pid = resource_tracker._resource_tracker._pid
    os.kill(pid, signal.SIGKILL)
    assert leftovers.soon(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "resource_tracker")  # the standard library tells of its own
        assert launch(dist.get_rank, nproc=2) == [0, 1]


def test_forkserver_that_is_killed_during_a_call():
    def kill_it():
        time.sleep(0.2)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    pid = forkserver._forkserver._forkserver_pid
    error = failure(kill_it, nproc=2)
    assert "ranks 0-1 died" in str(error)
    assert leftovers.soon(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert launch(dist.get_rank, nproc=2) == [0, 1]


def test_interrupt_that_another_thread_takes():
    """The system gives a signal to any thread; the one that waits for the ranks is not woken by it."""
    timer = threading.Timer(0.5, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        launch(time.sleep, 1000, nproc=2)
    assert time.monotonic() - start < 5


def test_interrupt_in_the_middle_of_a_call():
    """A Ctrl-C at any moment of a call ends it, and leaves nothing."""

    def step():
        dist.barrier()
        time.sleep(1000)

    for delay in np.linspace(0.001, 0.25, 25):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            launch(step, nproc=3)
        assert time.monotonic() - start < 5
        timer.join()
    assert launch(dist.get_rank, nproc=2) == [0, 1]


def test_interrupt_between_a_pipe_and_what_closes_it(monkeypatch):
    make = os.pipe

    def pipe():
        ends = make()
        os.kill(os.getpid(), signal.SIGINT)
        return ends

    monkeypatch.setattr(os, "pipe", pipe)
    with pytest.raises(KeyboardInterrupt):
        launch(dist.get_rank, nproc=2)


# --- scripts ----------------------------------------------------------------------------------------------------------


SCRIPT = """
import os
import torch.distributed as dist
from helpers.ranks.launch import launch

def step(x):
    return x / dist.get_rank()

print(launch(lambda x: x + dist.get_rank(), 1, nproc=2))
"""


def run_script(path, last_line):
    """The finished process of a plain script, which has no ``if __name__ == "__main__"``."""
    path.write_text(f"{SCRIPT}{last_line}\n")
    with leftovers.surroundings() as environment:
        command = [sys.executable, "-W", "error", path.name]
        return subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, timeout=60)


def test_plain_script_needs_no_main_guard_and_shows_the_ranks_traceback(tmp_path):
    done = run_script(tmp_path / "script.py", "launch(step, 1, nproc=2)")
    assert (done.returncode, done.stdout) == (1, "[1, 2]\n")
    assert "RankError: rank 0 failed first: ZeroDivisionError" in done.stderr
    assert "line 7 of step in script.py: return x / dist.get_rank()" in done.stderr


def test_script_that_is_killed_leaves_nothing(tmp_path):
    assert run_script(tmp_path / "script.py", "os.kill(os.getpid(), 9)").returncode == -9


def test_process_group_that_is_killed_right_after_the_forkservers_start_leaves_nothing():
    """As nbval ends the kernel of a short notebook: the forkserver still imports torch then."""
    source = "import os\nfrom helpers.ranks.launch import warm\nwarm()\nos.killpg(0, 9)"
    with leftovers.surroundings() as environment:
        done = subprocess.run([sys.executable, "-c", source], env=environment, start_new_session=True, timeout=60)
    assert done.returncode == -9


# --- a notebook's kernel ----------------------------------------------------------------------------------------------


WARM = """
    %reload_ext helpers
    import os, time, pathlib, torch
    import torch.distributed as dist
    from helpers.ranks.launch import launch

    def hang():
        inside = pathlib.Path(os.environ["WORLD_SIZE_ONE_STORE"]).parent
        (inside / f"inside{dist.get_rank()}").touch()
        dist.barrier() if dist.get_rank() else sum(range(10**13))  # in a collective; and where the GIL is not let go

    print(launch(dist.get_rank, nproc=2))
"""


@pytest.fixture(scope="module")
def own_kernel(warmed_up):
    with leftovers.surroundings() as environment:
        kernel = leftovers.Kernel(environment)
        yield kernel
        kernel.close()


@pytest.fixture
def kernel(own_kernel):
    """The kernel, whatever the test before did to it, with helpers loaded and a launch behind it."""
    reply, printed = own_kernel.run(WARM)
    assert (reply["status"], printed) == ("ok", "[0, 1]\n"), reply
    return own_kernel


def test_interrupt_of_the_kernel(kernel):
    kernel.start("launch(hang, nproc=2)")
    assert kernel.ranks() == 2
    start = time.monotonic()
    kernel.manager.interrupt_kernel()
    reply = kernel.client.get_shell_msg(timeout=20)["content"]
    assert time.monotonic() - start < 5
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
    assert kernel.ranks() == 0  # at once: the cell ends after them
    assert kernel.run("print(launch(dist.get_rank, nproc=2))")[1] == "[0, 1]\n"


def test_interrupt_of_an_idle_kernel_spares_the_forkserver(kernel):
    server = "from multiprocessing.forkserver import _forkserver as server; print(server._forkserver_pid)"
    before = kernel.run(server)[1]
    kernel.manager.interrupt_kernel()
    assert kernel.run("print(launch(dist.get_rank, nproc=2))")[1] == "[0, 1]\n"
    assert kernel.run(server)[1] == before


def restart_now(kernel):
    kernel.manager.restart_kernel(now=True)


def restart_politely(kernel):
    kernel.manager.restart_kernel(now=False)


def sigkill(kernel):
    os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)
    kernel.manager.restart_kernel(now=True)


@pytest.mark.parametrize("end", [restart_now, restart_politely, sigkill])
def test_end_of_the_kernel_leaves_nothing(kernel, end):
    """With ranks that hang, and idle: no process and no file is left of the old kernel."""
    for hangs in (True, False):
        if hangs:
            kernel.start("launch(hang, nproc=2)")
        else:
            kernel.run(WARM)
        old = leftovers.processes(kernel.mark)
        assert len(old) == (5 if hangs else 3)
        end(kernel)
        kernel.connect()
        assert leftovers.soon(lambda old=old: not set(old) & set(leftovers.processes(kernel.mark))), (
            leftovers.processes(kernel.mark)
        )
        assert leftovers.soon(lambda: not leftovers.listing(kernel.folder)), leftovers.listing(kernel.folder)
