"""The loopback interface, and a port of it for a store that starts later, for launchers side by side."""

import contextlib
import socket
import sys
from collections.abc import Iterator

# The network interface of this machine alone.
LOOPBACK = "lo"
if sys.platform == "darwin":
    LOOPBACK = "lo0"


@contextlib.contextmanager
def hold_port() -> Iterator[int]:
    """A context in which a port of the loopback interface is reserved for a store that starts later; gives its number.

    While the context's socket is bound to the port, the system gives the port to no other program that asks for a free
    one. The store can still listen there, because this socket does not listen, and because both set SO_REUSEADDR.
    """
    with socket.socket() as bound_socket:
        bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        any_free_port = 0
        bound_socket.bind(("127.0.0.1", any_free_port))
        _, port = bound_socket.getsockname()
        yield port
