"""A held port: free for a store, taken for everybody else."""

import errno
import socket

import pytest
import torch.distributed as dist

from helpers.ranks.ports import hold_port


def test_a_held_port_is_for_a_store_alone():
    with hold_port() as port, hold_port() as other:
        assert port != other
        with socket.socket() as stranger, pytest.raises(OSError) as refused:
            stranger.bind(("127.0.0.1", port))
        assert refused.value.errno == errno.EADDRINUSE
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert store.port == port and dist.TCPStore("127.0.0.1", port).get("key") == b"value"


def test_a_port_is_given_back():
    with hold_port() as port:
        pass
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", port))
