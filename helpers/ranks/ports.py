"""A port for a store that starts later, for chapters and tests that start launchers side by side."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def hold_port() -> Iterator[int]:
    """A context that reserves a port of the loopback interface for a store, and gives the port's number.

    The port's socket is bound and does not listen, so the system gives the port to nobody else. A store can still
    listen on it, because the store and the socket both set SO_REUSEADDR.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
