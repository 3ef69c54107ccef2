"""The process group: one rank in this process, real torchrun, every wrong setting, and nothing left behind."""

import contextlib
import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from unittest import mock

import leftovers
import psutil
import pytest
import torch
import torch.distributed as dist

from helpers.ranks.launch import RankError, launch
from helpers.runtime.process_group import print0, run_and_exit, start_process_group, stop_process_group

LAUNCHED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def warmed_up():
    """What the first use of a group, of the ranks and of gloo's threads changes for good."""
    with contextlib.suppress(KeyError):
        del os.environ["GLOO_SOCKET_IFNAME"]
    start_process_group()
    stop_process_group()
    launch(print, nproc=1)


@pytest.fixture(autouse=True)
def no_group_left(request, warmed_up, monkeypatch):
    """Every test starts without a launcher's variables and without a group, and leaves nothing."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    with contextlib.nullcontext() if "kernel" in request.fixturenames else leftovers.unchanged():
        yield
        stop_process_group()
    assert not dist.is_initialized()


def total():
    """The sum over the ranks of 1: their number, by a collective that really runs."""
    one = torch.ones(1)
    dist.all_reduce(one)
    return one.item()


def private_folders():
    return list(Path(tempfile.gettempdir()).glob(f"one-rank-{os.getpid()}-*"))


# --- in a notebook ----------------------------------------------------------------------------------------------------


def test_one_rank_on_gloo():
    assert start_process_group() == CPU
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend(), total()) == (0, 1, "gloo", 1.0)


def test_folder_is_private_and_gone_after_stop():
    start_process_group()
    (folder,) = private_folders()
    assert folder.stat().st_mode & 0o077 == 0
    stop_process_group()
    assert private_folders() == []


def test_starting_twice_keeps_the_group():
    start_process_group()
    group = dist.group.WORLD
    assert start_process_group() == start_process_group("gloo") == CPU
    assert dist.group.WORLD is group and len(private_folders()) == 1


def test_stopping_twice():
    start_process_group()
    stop_process_group()
    stop_process_group()


def test_start_after_stop():
    for _ in range(3):
        start_process_group()
        assert total() == 1.0
        stop_process_group()


def test_start_after_an_exception():
    with pytest.raises(ZeroDivisionError):
        start_process_group()
        1 / 0  # noqa: B018
    assert start_process_group() == CPU and total() == 1.0


def test_stop_while_an_exception_is_raised():
    with pytest.raises(ZeroDivisionError):
        try:
            start_process_group()
            1 / 0  # noqa: B018
        finally:
            stop_process_group()
    assert not dist.is_initialized() and private_folders() == []


def test_subgroups():
    start_process_group()
    group = dist.new_group([0])
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    assert x.item() == 1.0 and mesh.size() == 1


def test_no_socket_that_another_machine_can_reach():
    before = set(psutil.Process().net_connections(kind="inet"))
    start_process_group()
    dist.new_group([0])
    total()
    opened = set(psutil.Process().net_connections(kind="inet")) - before
    assert {connection.laddr.ip for connection in opened} <= {"127.0.0.1", "::1"}


def test_readers_own_interface_is_kept(monkeypatch):
    name = "lo0" if sys.platform == "darwin" else "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    start_process_group()
    assert os.environ["GLOO_SOCKET_IFNAME"] == name


@pytest.mark.parametrize("error", [RuntimeError("no network"), KeyboardInterrupt()])
def test_group_that_could_not_start_leaves_nothing(error, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(dist, "init_process_group", mock.Mock(side_effect=error))
        start_process_group()
    assert private_folders() == [] and not dist.is_initialized()
    assert start_process_group() == CPU


def test_print0(capsys):
    print0("without", "a group", sep="-")
    start_process_group()
    print0("with one", end="!\n")
    assert capsys.readouterr().out == "without-a group\nwith one!\n"


def test_print0_on_ranks(capsys):
    def talk():
        print0("in the group")
        dist.destroy_process_group()
        print0("after it")

    launch(talk, nproc=2)
    assert capsys.readouterr().out == "[rank 0] in the group\n[rank 0] after it\n"


def test_start_and_stop_inside_a_rank():
    def step():
        device = start_process_group()
        ranks = total()
        stop_process_group()
        stop_process_group()
        return device, ranks, dist.is_initialized()

    assert launch(step, nproc=2) == [(CPU, 2.0, False)] * 2


# --- what others left -------------------------------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A temporary folder of this test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def die_with_a_group(folder, how):
    """In a rank: become a kernel with a group of its own, and die."""
    dist.destroy_process_group()
    for name in LAUNCHED:
        os.environ.pop(name, None)
    tempfile.tempdir = folder
    start_process_group()
    assert len(os.listdir(folder)) == 1
    os.kill(os.getpid(), how)


def test_folder_of_a_killed_kernel_is_removed_by_the_next_start(temporary):
    with pytest.raises(RankError, match="SIGKILL"):
        launch(die_with_a_group, str(temporary), signal.SIGKILL, nproc=1)
    (stale,) = temporary.iterdir()
    assert any(stale.iterdir())  # the rendezvous file that would be fatal
    start_process_group()
    assert not stale.exists() and total() == 1.0


def test_folder_of_a_running_process_is_kept(temporary):
    folder = temporary / f"one-rank-{os.getppid()}-abc"
    folder.mkdir()
    start_process_group()
    stop_process_group()
    assert folder.exists()


@pytest.mark.parametrize("owner", ["abc-x", "-1-x", "0-x", "1", "", "²-x", f"{10**30}-x"])
@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_odd_names_in_the_temporary_folder_do_no_harm(temporary, owner, kind):
    path = temporary / f"one-rank-{owner}"
    {"folder": path.mkdir, "file": path.touch, "dangling link": lambda: path.symlink_to("nowhere")}[kind]()
    start_process_group()
    stop_process_group()


@pytest.fixture
def ended():
    """The id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_folder_that_cannot_be_removed_does_no_harm(temporary, ended, monkeypatch):
    folder = temporary / f"one-rank-{ended}-x"
    (folder / "inside").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", mock.Mock(side_effect=PermissionError))  # as for another user's; root may all
        start_process_group()
    stop_process_group()


def test_link_to_a_folder_is_not_followed(temporary, ended, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "precious").touch()
    (temporary / f"one-rank-{ended}-x").symlink_to(elsewhere)
    start_process_group()
    assert (elsewhere / "precious").exists()


@pytest.fixture
def kernel():
    with leftovers.surroundings() as environment:
        kernel = leftovers.Kernel(environment)
        yield kernel
        kernel.close()


def test_restart_of_a_notebooks_kernel(kernel):
    start = """
        import warnings
        from helpers.runtime.process_group import start_process_group, stop_process_group
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            print(start_process_group(), start_process_group())
    """
    for _ in range(2):
        assert kernel.run(start)[1] == "cpu cpu\n"
        (folder,) = leftovers.listing(kernel.folder)  # one: the one that the killed kernel left is gone
        everything = psutil.Process(kernel.manager.provisioner.pid).net_connections(kind="inet")
        assert {connection.laddr.ip for connection in everything} == {"127.0.0.1"}
        kernel.manager.restart_kernel(now=True)  # SIGKILL
        kernel.connect()
    assert kernel.run(start)[1] == "cpu cpu\n"
    kernel.manager.restart_kernel(now=False)
    assert leftovers.soon(lambda: not leftovers.listing(kernel.folder))
    kernel.connect()


# --- wrong settings ---------------------------------------------------------------------------------------------------


def refused(*args):
    """The text of start_process_group's error, which has two lines; no group may have started."""
    with pytest.raises(RuntimeError) as caught:
        start_process_group(*args)
    assert not dist.is_initialized() and private_folders() == []
    lines = str(caught.value).splitlines()
    assert len(lines) == 2, lines
    return lines


def some(variables):
    """Every choice of some of the launcher's variables, not all."""
    return [choice for size in range(1, len(variables)) for choice in itertools.combinations(variables, size)]


@pytest.mark.parametrize("given", some(LAUNCHED), ids=" ".join)
def test_half_set_launcher_variables(given, monkeypatch):
    for name in given:
        monkeypatch.setenv(name, LAUNCHED[name])
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(given):
        problem, remedy = refused()
        assert all(f"{name}={LAUNCHED[name] if name in given else 'missing'}" in problem for name in LAUNCHED)
        assert "torchrun" in remedy and "unset RANK, WORLD_SIZE and LOCAL_RANK" in remedy
    else:  # a shell's MASTER_ADDR alone makes no rank
        assert start_process_group() == CPU and dist.get_world_size() == 1


@pytest.mark.parametrize(
    "name, value",
    [
        ("RANK", "2"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("RANK", "1.0"),
        ("LOCAL_RANK", "2"),
        ("LOCAL_RANK", "-1"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "many"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("MASTER_PORT", "http"),
        ("MASTER_ADDR", ""),
    ],
)
def test_impossible_launcher_variable(name, value, monkeypatch):
    for key, usual in {**LAUNCHED, name: value}.items():
        monkeypatch.setenv(key, usual)
    problem, remedy = refused()
    assert f"{name}={value}" in problem and "torchrun" in remedy


def test_nccl_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    problem, remedy = refused("nccl")
    assert "1 needed on this node, 0 found" in problem and "backend='gloo'" in remedy


def test_other_backend_while_one_runs():
    start_process_group()
    with pytest.raises(RuntimeError, match="gloo is running, and nccl was asked for") as caught:
        start_process_group("nccl")
    assert "stop_process_group()" in str(caught.value) and dist.is_initialized()


# --- which backend, on machines with GPUs that this one may not have -------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """What was asked of torch, where no GPU is needed for the asking."""
    seen = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: seen.update(options, backend=backend))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.update(set_device=device))
    return seen


@pytest.mark.parametrize(
    "launched, gpus, given, backend, device",
    [
        (True, 2, None, "nccl", "cuda:1"),
        (True, 8, None, "nccl", "cuda:1"),
        (True, 1, None, "gloo", "cpu"),
        (True, 0, None, "gloo", "cpu"),
        (True, 2, "gloo", "gloo", "cpu"),
        (True, 2, "nccl", "nccl", "cuda:1"),
        (False, 2, None, "gloo", "cpu"),
        (False, 1, "nccl", "nccl", "cuda:0"),
    ],
)
def test_backend_follows_the_gpus(launched, gpus, given, backend, device, asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name, value in LAUNCHED.items() if launched else ():
        monkeypatch.setenv(name, value)
    assert start_process_group(given) == torch.device(device)
    assert asked["backend"] == backend
    on_gpu = torch.device(device) if backend == "nccl" else None
    assert asked.get("device_id") == asked.get("set_device") == on_gpu
    assert asked.get("init_method", "env://").startswith("env://" if launched else "file://")
    for folder in private_folders():
        folder.rmdir()


# --- the end of a script ----------------------------------------------------------------------------------------------


def ending(main):
    """(exit status, output) of a rank that ends by run_and_exit."""
    output = io.StringIO()
    with pytest.raises(RankError, match="exit code") as caught, contextlib.redirect_stdout(output):
        launch(lambda: run_and_exit(main, "the arguments"), nproc=1)
    return int(str(caught.value).rpartition(" ")[2]), output.getvalue().replace("[rank 0] ", "")


def test_status_and_output_of_a_script_that_ends_well():
    def main(args):
        sys.stdout.write(f"called with {args}")

    assert ending(main) == (0, "called with the arguments\n")


@pytest.mark.parametrize(
    "error, last_line",
    [
        (ValueError("no data"), "ValueError: no data"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit: 3"),
        (SystemExit("no data"), "SystemExit: no data"),
    ],
)
def test_status_and_traceback_of_a_script_that_fails(error, last_line):
    def main(args):
        print("before")
        raise error

    status, output = ending(main)
    assert status == 1
    assert output.startswith("before\nTraceback (most recent call last):\n") and output.endswith(f"\n{last_line}\n")


def test_status_where_nobody_reads_the_output():
    """``script.py | head`` closes the pipe; the script still ends, and at once."""

    def main(args):
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        sys.stdout.write("into nothing")

    status, _ = ending(main)
    assert status in (0, 1)


SCRIPT = """
    import os, sys
    import torch
    import torch.distributed as dist
    from helpers.runtime.process_group import print0, run_and_exit, start_process_group, stop_process_group

    def main(args):
        device = start_process_group()
        try:
            x = torch.ones(1)
            dist.all_reduce(x)
            print0(f"{device} {dist.get_backend()} {dist.get_world_size()} {x.item()}")
            if "fail" in sys.argv and dist.get_rank() == 1:
                raise ValueError("rank 1 has no data")
            dist.barrier()
        finally:
            stop_process_group()
        print0("stopped", dist.is_initialized())
        if "forget" in sys.argv:
            start_process_group()

    if "exit" in sys.argv:
        run_and_exit(main, None)
    main(None)
"""


def run(command, environment, folder, *flags):
    """The finished process of SCRIPT under ``command``."""
    script = Path(folder) / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-W", "error", *command, script, *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("flags", [[], ["forget"], ["exit"]])
def test_script_without_a_launcher(flags, tmp_path):
    """Also where it does not stop its group: no warning, no file."""
    with leftovers.surroundings() as environment:
        done = run([], environment, tmp_path, *flags)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cpu gloo 1 1.0\nstopped False\n", "")


def torchrun():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return ["-m", "torch.distributed.run", "--nproc-per-node=2", "--nnodes=1", *address]


@pytest.fixture
def two_ranks():
    with leftovers.surroundings() as environment:
        yield {**environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def test_two_ranks_under_torchrun(two_ranks, tmp_path):
    done = run(torchrun(), two_ranks, tmp_path, "exit")
    assert (done.returncode, done.stdout) == (0, "cpu gloo 2 2.0\nstopped False\n"), done.stderr


@pytest.mark.parametrize("flags", [["fail"], ["fail", "exit"]])
def test_failing_rank_under_torchrun_ends_all(flags, two_ranks, tmp_path):
    """Its peer waits in a barrier, and the failing rank's ``finally`` stops the group: nobody may hang."""
    done = run(torchrun(), two_ranks, tmp_path, *flags)
    assert done.returncode == 1 and "ValueError: rank 1 has no data" in done.stderr


def test_an_error_file_is_finished_although_the_agent_asks_to_end(tmp_path):
    """The agent sends SIGTERM to the peers of a dead rank, and dies itself of an error file that is half written."""
    source = """
        import os, signal
        from helpers.runtime.process_group import run_and_exit

        class Slow(Exception):
            def __str__(self):  # while it is written down
                os.kill(os.getpid(), signal.SIGTERM)
                return "rank 0 has gone"

        def main(args):
            raise Slow

        run_and_exit(main, None)
    """
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    command = [sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Slow: rank 0 has gone" in done.stderr
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "Slow: rank 0 has gone"
