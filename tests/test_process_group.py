"""The process group: one rank here, real ranks with pretended GPUs, and errors that name ranks."""

import os
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

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

LAUNCHER = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
CPU = torch.device("cpu")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@pytest.fixture(scope="module", autouse=True)
def warmed_up():
    """Use a group, ranks and gloo's threads once: what that changes stays, and must not count as left behind."""
    start_process_group()
    stop_process_group()
    launch(print, nproc=1)
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(autouse=True)
def no_group_left(warmed_up, monkeypatch):
    """Each test starts without a launcher's variables, without GPUs and without a group, and leaves nothing."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with leftovers.unchanged():
        yield
        stop_process_group()
    assert not dist.is_initialized()


# --- one rank ---------------------------------------------------------------------------------------------------------


def test_one_rank_starts_and_stops_as_often_as_asked(capsys):
    for _ in range(3):
        assert start_process_group() == CPU
        group = dist.group.WORLD
        assert start_process_group() == CPU and dist.group.WORLD is group
        x = torch.ones(1)
        dist.all_reduce(x)
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend(), x.item()) == (0, 1, "gloo", 1.0)
        stop_process_group()
        stop_process_group()
    assert capsys.readouterr().out == "1 rank(s), gloo on cpu\n" * 3


@pytest.mark.parametrize("readers", ["", "eth7"])
def test_no_socket_of_a_notebook_that_another_machine_can_reach(readers, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", readers)
    if not readers:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")  # the test's end restores it
    monkeypatch.setattr("helpers.ranks.magic.load", lambda shell: None)
    helpers.load_ipython_extension(None)
    assert os.environ["GLOO_SOCKET_IFNAME"] == (readers or LOOPBACK)
    if not readers:
        before = set(psutil.Process().net_connections(kind="inet"))
        start_process_group()
        group = dist.new_group([0])
        sockets = set(psutil.Process().net_connections(kind="inet")) - before
        assert {socket.laddr.ip for socket in sockets} == {"127.0.0.1"} and group is not None


def test_print0_is_silent_on_other_ranks_after_the_group_too(capsys):
    print0("without", "a group")

    def talk():
        print0("in the group")
        dist.destroy_process_group()
        print0("after it")

    launch(talk, nproc=2)
    assert capsys.readouterr().out == "without a group\n[rank 0] in the group\n[rank 0] after it\n"


# --- which backend, on machines with pretended GPUs -------------------------------------------------------------------


def pretend(gpus):
    """Pretend ``gpus`` GPUs, and start no group; return what the group would have been started with."""
    group = SimpleNamespace(current=None)
    torch.cuda.device_count = lambda: gpus
    torch.cuda.set_device = lambda device: setattr(group, "current", None if device == -1 else device)  # -1: no change
    dist.init_process_group = lambda backend, **options: group.__dict__.update(options, backend=backend)
    return group


def start_as(settings, backend, agent):
    """In a rank of ``launch``: (backend, device) of a start with these settings, or the error's text.

    A setting is a list of one value a rank. ``agent`` is the port of a store that outlives the ranks, as torchrun's
    agent serves one; None: rank 0 serves it.
    """
    rank = dist.get_rank()
    mine = {name: values[rank] for name, values in settings.items()}
    server = None
    if agent is None and rank == 0:  # so that torch's server can share the port
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    port = [agent or (server.port if server else None)]
    dist.broadcast_object_list(port, src=0)
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0])}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": str(agent is not None)}
    os.environ["LOCAL_RANK"] = str(mine.get("LOCAL_RANK", rank))
    del os.environ["LOCAL_WORLD_SIZE"]
    if "LOCAL_WORLD_SIZE" in mine:
        os.environ["LOCAL_WORLD_SIZE"] = str(mine["LOCAL_WORLD_SIZE"])
    os.uname = lambda: SimpleNamespace(nodename=mine.get("host", "here"))
    group = pretend(mine["gpus"])
    try:
        device = start_process_group(backend, timedelta(seconds=300))  # longer than launch waits
    except RuntimeError as error:
        return str(error)
    assert group.device_id == group.current == (device if group.backend == "nccl" else None)
    assert (group.rank, group.world_size) == (rank, 2)
    return group.backend, str(device)


CPUS = [("gloo", "cpu")] * 2
NO_COMMON = (
    "No common backend: {}. A node's ranks must all see its GPUs (so no --gpus-per-task), and need one each. "
    "On CPUs: --backend gloo."
)
TWO_LOCAL = {"LOCAL_WORLD_SIZE": [2, 2]}  # as torchrun sets it; srun does not
NODES = {"LOCAL_RANK": [0, 0], "LOCAL_WORLD_SIZE": [1, 1], "host": ["gpu07", "gpu08"]}


@pytest.mark.parametrize(
    ("gpus", "backend", "settings", "expected"),
    [
        ([8, 8], "", TWO_LOCAL, [("nccl", "cuda:0"), ("nccl", "cuda:1")]),
        ([0, 0], None, TWO_LOCAL, CPUS),
        ([2, 2], "gloo", TWO_LOCAL, CPUS),
        ([1, 1], None, TWO_LOCAL, [NO_COMMON.format("1 GPUs for 2 ranks on here")] * 2),
        # Each task of srun may see its own GPU as number 0, so LOCAL_RANK has to be 0.
        ([1, 1], None, {"LOCAL_RANK": [0, 0]}, [("nccl", "cuda:0")] * 2),
        ([1, 1], None, {"LOCAL_RANK": [0, 1]}, [NO_COMMON.format("1 GPUs for 2 ranks on here, nccl on here")] * 2),
        # With one broken GPU, its node would start gloo and the other NCCL, and each would wait for the other.
        ([8, 0], None, NODES, [NO_COMMON.format("gloo on gpu08, nccl on gpu07")] * 2),
    ],
)
def test_two_ranks_agree_on_a_backend_or_raise_at_once(gpus, backend, settings, expected):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for agent in (store.port, None):
        assert launch(start_as, {"gpus": gpus, **settings}, backend, agent, nproc=2) == expected


@pytest.mark.parametrize(("gpus", "backend", "device"), [(1, None, "cuda:0"), (8, "gloo", "cpu")])
def test_plain_python_uses_the_gpu(gpus, backend, device, monkeypatch):
    for name in ("device_count", "set_device"):
        monkeypatch.setattr(torch.cuda, name, None)
    monkeypatch.setattr(dist, "init_process_group", None)  # pretend() sets them; the test's end restores them
    group = pretend(gpus)
    assert start_process_group(backend) == torch.device(device)
    assert (group.rank, group.world_size) == (0, 1)


def test_nccl_without_a_gpu():
    with pytest.raises(RuntimeError, match="0 GPUs for 1 ranks on .*--backend gloo"):
        start_process_group("nccl")


# --- who is missing, and the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LOCAL_RANK", "WORLD_SIZE"])
def test_missing_variable_is_named(name, monkeypatch):
    for other in {*LAUNCHER} - {name}:
        monkeypatch.setenv(other, "1")
    with pytest.raises((ValueError, KeyError), match=name):
        start_process_group()


def test_address_alone_makes_no_rank(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "gpu07")  # people export it in their shells
    assert start_process_group() == CPU and dist.get_world_size() == 1


def test_missing_rank_is_named_by_rank_0():
    def start_without_rank_1(port):
        rank = dist.get_rank()
        dist.destroy_process_group()
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        if rank == 1:
            return "never came"
        rendezvous = dist.rendezvous

        def unhurried(*where, timeout):  # the connection, which is not what has to time out
            for server, *place in rendezvous(*where, timeout=timedelta(seconds=60)):
                server.set_timeout(timeout)
                yield server, *place

        dist.rendezvous = unhurried
        try:
            start_process_group(timeout=timedelta(seconds=2))
        except dist.DistStoreError as error:
            return str(error)

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    zero, _, two = launch(start_without_rank_1, store.port, nproc=3)
    assert "backend of rank 1" in zero and "word of rank 0" in two


@pytest.mark.parametrize(("backend", "calls"), [("gloo", ["sleep", "destroy"]), ("nccl", ["destroy"])])
def test_nothing_of_gloos_end_is_done_on_nccl(backend, calls, monkeypatch):
    order = []
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_backend", lambda: backend)
        patch.setattr(dist, "destroy_process_group", lambda: order.append("destroy"))
        patch.setattr(time, "sleep", lambda seconds: order.append("sleep"))
        stop_process_group()
    assert order == calls
