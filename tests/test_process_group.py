"""The process group: one rank without torchrun, the choice of a device on pretended GPUs, and the end."""

import os
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

import helpers
from helpers.runtime.process_group import start_process_group, stop_process_group

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
VARIABLES_OF_TASKS = ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@pytest.fixture(autouse=True)
def no_launcher_and_no_gpus(monkeypatch):
    """Each test starts without a launcher's variables, without GPUs and without a group."""
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        *VARIABLES_OF_TASKS,
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    yield
    stop_process_group()
    assert not dist.is_initialized()


# ---- One rank, without torchrun


def test_one_rank_starts_and_stops_as_often_as_asked(capsys):
    for _ in range(2):
        assert start_process_group() == CPU
        group = dist.group.WORLD
        assert start_process_group() == CPU
        assert dist.group.WORLD is group
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        stop_process_group()
        stop_process_group()
    assert capsys.readouterr().out == "1 rank(s), gloo on cpu\n" * 2


def test_an_exported_address_alone_makes_no_rank(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "gpu07")  # people export it in their shells
    start_process_group()
    assert dist.get_world_size() == 1


@pytest.mark.parametrize("name", VARIABLES_OF_TASKS)
def test_tasks_of_srun_or_mpirun_without_torchrun_do_not_become_worlds_of_one(name, monkeypatch):
    monkeypatch.setenv(name, "2")
    with pytest.raises(RuntimeError, match=f"each would train alone .{name} is 2"):
        start_process_group()
    monkeypatch.setenv(name, "1")  # a shell in Slurm
    start_process_group()
    assert dist.get_world_size() == 1


@pytest.fixture
def load_extension(monkeypatch):
    """Loads the extension as ``%load_ext helpers`` does, with this interface in the reader's environment."""

    def load(interface):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)  # so that the end of the test restores what was set before
        if not interface:
            monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        monkeypatch.setattr("helpers.ranks.magic.load", lambda shell: None)
        helpers.load_ipython_extension(None)

    return load


def test_a_notebook_opens_no_socket_that_another_machine_can_reach(load_extension):
    load_extension("")
    assert os.environ["GLOO_SOCKET_IFNAME"] == LOOPBACK
    before = set(psutil.Process().net_connections(kind="inet"))
    start_process_group()
    group = dist.new_group([0])
    opened = set(psutil.Process().net_connections(kind="inet")) - before
    assert {socket.laddr.ip for socket in opened} == {"127.0.0.1"}
    assert group is not None


def test_the_readers_own_interface_is_kept(load_extension):
    load_extension("eth7")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


# ---- The device of a rank, on machines with pretended GPUs


@pytest.fixture
def pretend(monkeypatch):
    """Pretends so many GPUs, and torchrun if there is a local rank. Gives what the group will be started with."""

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


@pytest.mark.parametrize(("local_rank", "number"), [(None, 0), (1, 1)])
def test_a_rank_takes_nccl_and_its_own_gpu(pretend, local_rank, number):
    started = pretend(gpus=2, local_rank=local_rank)
    device = torch.device("cuda", number)
    assert start_process_group("") == device  # the default of a flag is empty
    assert (started["backend"], started["device_id"], started["current"]) == ("nccl", device, device)


def test_a_rank_takes_gloo_where_it_is_asked_for(pretend):
    started = pretend(gpus=2, local_rank=1)
    assert start_process_group("gloo") == CPU
    assert (started["backend"], started["device_id"]) == ("gloo", None)
    assert "current" not in started


def test_nccl_beside_gloo_takes_the_gpu_too(pretend):
    pretend(gpus=2, local_rank=1)
    assert start_process_group("cpu:gloo,cuda:nccl") == torch.device("cuda", 1)


def test_a_rank_without_a_gpu_of_its_own_raises(pretend):
    started = pretend(gpus=1, local_rank=1)  # srun --gpus-per-task=1 shows each rank one GPU, as number 0
    with pytest.raises(RuntimeError, match=r"^Local rank 1 on .* sees 1 GPUs\.\n.*no --gpus-per-task") as raised:
        start_process_group()
    assert len(str(raised.value).splitlines()) == 2
    assert not started


# ---- The end


@pytest.mark.parametrize(("backend", "pauses"), [("gloo", [0.1]), ("nccl", [])])
def test_a_group_ends_after_a_pause_on_gloo_and_at_once_on_nccl(monkeypatch, backend, pauses):
    slept = []
    start_process_group("gloo")
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(time, "sleep", slept.append)
    stop_process_group()
    assert slept == pauses
