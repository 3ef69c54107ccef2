"""The process group: one rank here, the choice of a device on pretended GPUs, and the end."""

import os
import sys
import time

import cloudpickle
import leftovers
import psutil
import pytest
import torch
import torch.distributed as dist

import helpers
from helpers.ranks.launch import launch
from helpers.runtime.process_group import print0, start_process_group, stop_process_group

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second
pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@pytest.fixture(scope="module", autouse=True)
def warmed_up():
    """Use a group, ranks and gloo's threads once: what that changes stays, and must not count as left behind."""
    start_process_group()
    stop_process_group()
    launch(print, nproc=1)


@pytest.fixture(autouse=True)
def no_group_left(warmed_up, monkeypatch):
    """Each test starts without a launcher's variables, without GPUs and without a group, and leaves nothing."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with leftovers.unchanged():
        yield
        stop_process_group()
    assert not dist.is_initialized()


# ---- One rank, without torchrun


def test_one_rank_starts_and_stops_as_often_as_asked(capsys):
    for _ in range(3):
        assert start_process_group() == CPU
        group = dist.group.WORLD
        assert start_process_group() == CPU
        assert dist.group.WORLD is group
        x = torch.ones(1)
        dist.all_reduce(x)
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend(), x.item()) == (0, 1, "gloo", 1.0)
        stop_process_group()
        stop_process_group()
    assert capsys.readouterr().out == "1 rank(s), gloo on cpu\n" * 3


def test_a_notebook_opens_no_socket_that_another_machine_can_reach(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")  # the end of the test restores what was set before
    monkeypatch.setattr("helpers.ranks.magic.load", lambda shell: None)
    helpers.load_ipython_extension(None)
    assert os.environ["GLOO_SOCKET_IFNAME"] == LOOPBACK
    before = set(psutil.Process().net_connections(kind="inet"))
    start_process_group()
    group = dist.new_group([0])
    opened = set(psutil.Process().net_connections(kind="inet")) - before
    assert {socket.laddr.ip for socket in opened} == {"127.0.0.1"}
    assert group is not None


def test_the_readers_own_interface_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setattr("helpers.ranks.magic.load", lambda shell: None)
    helpers.load_ipython_extension(None)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_an_exported_address_alone_makes_no_rank(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "gpu07")  # people export it in their shells
    assert start_process_group() == CPU
    assert dist.get_world_size() == 1


# ---- The device of a rank, on machines with pretended GPUs


@pytest.fixture
def pretend(monkeypatch):
    """A function that pretends so many GPUs under torchrun; what the group was then started with is in its result."""

    def pretended(gpus, local_rank=None):
        started = {}
        if local_rank is not None:
            monkeypatch.setenv("RANK", str(local_rank))
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: started.update(current=device))
        monkeypatch.setattr(dist, "init_process_group", lambda name, **keywords: started.update(keywords, backend=name))
        monkeypatch.setattr(dist, "get_world_size", lambda: 8)
        return started

    return pretended


@pytest.mark.parametrize("backend", [None, ""])  # the default of a flag is empty
@pytest.mark.parametrize("local_rank", [None, 0, 1])
def test_a_rank_takes_nccl_and_its_own_gpu(pretend, local_rank, backend):
    started = pretend(gpus=2, local_rank=local_rank)
    device = torch.device("cuda", local_rank or 0)
    assert start_process_group(backend) == device
    assert (started["backend"], started["device_id"], started["current"]) == ("nccl", device, device)


def test_a_rank_takes_gloo_where_it_is_asked_for(pretend):
    started = pretend(gpus=2, local_rank=1)
    assert start_process_group("gloo") == CPU
    assert (started["backend"], started["device_id"]) == ("gloo", None)
    assert "current" not in started


def test_nccl_beside_gloo_takes_the_gpu_too(pretend):
    pretend(gpus=2, local_rank=1)
    assert start_process_group("cpu:gloo,cuda:nccl") == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("gpus", "local_rank", "backend"),
    [
        (3, 3, None),  # a GPU of four is lost
        (0, 0, "nccl"),  # the driver is lost
        (1, 1, None),  # srun --gpus-per-task=1 shows each rank one GPU, as number 0
    ],
)
def test_a_rank_without_a_gpu_of_its_own_raises(pretend, gpus, local_rank, backend):
    started = pretend(gpus, local_rank)
    with pytest.raises(RuntimeError) as raised:
        start_process_group(backend)
    assert not started
    first, second = str(raised.value).splitlines()
    assert first == f"Local rank {local_rank} on {os.uname().nodename} sees {gpus} GPUs."
    assert "one rank per GPU" in second
    assert "no --gpus-per-task" in second
    assert "--backend gloo" in second


@pytest.mark.parametrize(("missing", "backend"), [("LOCAL_RANK", "nccl"), ("WORLD_SIZE", "gloo")])
def test_a_variable_that_a_launcher_forgot_is_named(missing, backend, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name != missing:
            monkeypatch.setenv(name, "1")
    with pytest.raises((ValueError, KeyError), match=missing):
        start_process_group(backend)


# ---- Output, and the end


def test_print0_is_silent_on_other_ranks_after_the_group_too(capsys):
    print0("without", "a group")

    def talk():
        print0("in the group")
        dist.destroy_process_group()
        print0("after it")

    launch(talk, nproc=2)
    assert capsys.readouterr().out == "without a group\n[rank 0] in the group\n[rank 0] after it\n"


@pytest.mark.parametrize(("backend", "calls"), [("gloo", ["sleep", "destroy"]), ("nccl", ["destroy"])])
def test_only_gloo_needs_a_moment_before_the_end(backend, calls, monkeypatch):
    order = []
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_backend", lambda: backend)
        patch.setattr(dist, "destroy_process_group", lambda: order.append("destroy"))
        patch.setattr(time, "sleep", lambda seconds: order.append("sleep"))
        stop_process_group()
    assert order == calls
