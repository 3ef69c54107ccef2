"""The process group: one rank without torchrun, the choice of a device on simulated GPUs, and the end."""

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
VARIABLES_OF_TORCHRUN = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
VARIABLES_OF_TASKS = ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]  # of srun and mpirun
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@pytest.fixture(autouse=True)
def no_launcher_and_no_gpus(monkeypatch):
    """Each test starts without a launcher's variables, without GPUs and without a group."""
    for name in [*VARIABLES_OF_TORCHRUN, *VARIABLES_OF_TASKS]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    yield
    stop_process_group()
    assert not dist.is_initialized()


# ---- One rank, without torchrun


def test_one_rank_starts_and_stops_as_often_as_asked(capsys):
    """A second start keeps the group, a second stop does nothing, and a group can be started after a stop."""
    for _ in range(2):
        assert start_process_group() == CPU
        group = dist.group.WORLD
        assert start_process_group() == CPU
        assert dist.group.WORLD is group
        assert dist.get_rank() == 0
        assert dist.get_world_size() == 1
        assert dist.get_backend() == "gloo"
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

    monkeypatch.setenv(name, "1")  # as in a shell that Slurm started
    start_process_group()
    assert dist.get_world_size() == 1


@pytest.fixture
def load_extension(monkeypatch):
    """A function that loads the extension as ``%load_ext helpers`` does.

    ``interface`` is the network interface that the reader has chosen before, or None.
    """

    def load_nothing(shell):
        pass

    def load(interface):
        # Set it in any case, so that monkeypatch restores what was there, even if the extension sets it.
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", str(interface))
        if interface is None:
            monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        monkeypatch.setattr("helpers.ranks.magic.load", load_nothing)  # without the magic, which needs a shell
        helpers.load_ipython_extension(None)

    return load


def test_a_notebook_opens_no_socket_that_another_machine_can_reach(load_extension):
    load_extension(None)
    assert os.environ["GLOO_SOCKET_IFNAME"] == LOOPBACK

    this_process = psutil.Process()
    before = set(this_process.net_connections(kind="inet"))
    start_process_group()
    group = dist.new_group([0])
    assert group is not None
    opened = set(this_process.net_connections(kind="inet")) - before
    addresses = {socket.laddr.ip for socket in opened}
    assert addresses == {"127.0.0.1"}


def test_the_readers_own_interface_is_kept(load_extension):
    load_extension("eth7")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


# ---- The device of a rank, on machines with simulated GPUs


@pytest.fixture
def fake_gpus(monkeypatch):
    """A function that makes torch find so many GPUs and, for a local rank, the variables of torchrun.

    It returns a dictionary in which the backend and the options of the group appear when it is started, and under
    "current" the device that was made the current one.
    """

    def fake(num_gpus, local_rank=None):
        started = {}

        def device_count():
            return num_gpus

        def set_device(device):
            started["current"] = device

        def init_process_group(backend, **options):
            started["backend"] = backend
            started.update(options)

        def get_world_size():
            return 8

        monkeypatch.setattr(torch.cuda, "device_count", device_count)
        monkeypatch.setattr(torch.cuda, "set_device", set_device)
        monkeypatch.setattr(dist, "init_process_group", init_process_group)
        monkeypatch.setattr(dist, "get_world_size", get_world_size)
        if local_rank is not None:
            monkeypatch.setenv("RANK", str(local_rank))
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        return started

    return fake


@pytest.mark.parametrize(("local_rank", "gpu"), [(None, 0), (1, 1)])
def test_a_rank_takes_nccl_and_its_own_gpu(fake_gpus, local_rank, gpu):
    started = fake_gpus(2, local_rank)
    no_backend = ""  # the default of the flag --backend
    device = start_process_group(no_backend)
    assert device == torch.device("cuda", gpu)
    assert started["backend"] == "nccl"
    assert started["device_id"] == device
    assert started["current"] == device


def test_a_rank_takes_gloo_where_it_is_asked_for(fake_gpus):
    started = fake_gpus(2, local_rank=1)
    assert start_process_group("gloo") == CPU
    assert started["backend"] == "gloo"
    assert started["device_id"] is None
    assert "current" not in started


def test_nccl_beside_gloo_takes_the_gpu_too(fake_gpus):
    fake_gpus(2, local_rank=1)
    assert start_process_group("cpu:gloo,cuda:nccl") == torch.device("cuda", 1)


def test_a_rank_without_a_gpu_of_its_own_raises(fake_gpus):
    """With srun --gpus-per-task=1, each rank sees a single GPU, as number 0."""
    started = fake_gpus(1, local_rank=1)
    with pytest.raises(RuntimeError, match=r"^Local rank 1 on .* sees 1 GPUs\.\n.*no --gpus-per-task") as raised:
        start_process_group()
    assert len(str(raised.value).splitlines()) == 2
    assert not started


def test_a_rank_that_was_not_told_its_local_rank_raises(fake_gpus, monkeypatch):
    """A batch file for srun may export RANK from Slurm's variables, and forget the other."""
    started = fake_gpus(2, local_rank=1)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(RuntimeError, match=r"^RANK is set, but LOCAL_RANK is not\.\nStart the script with torchrun"):
        start_process_group()
    assert not started


# ---- The end


@pytest.mark.parametrize(("backend", "pauses"), [("gloo", [0.1]), ("nccl", [])])
def test_a_group_ends_after_a_pause_on_gloo_and_at_once_on_nccl(monkeypatch, backend, pauses):
    """Without a pause, gloo may hang at its end. There is no NCCL here, so a group of gloo calls itself one of NCCL."""
    slept = []

    def get_backend():
        return backend

    start_process_group("gloo")
    monkeypatch.setattr(dist, "get_backend", get_backend)
    monkeypatch.setattr(time, "sleep", slept.append)
    stop_process_group()
    assert slept == pauses
