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
    """A context that reserves a port of the loopback interface for a store, and gives the port's number.

    Its socket is bound and does not listen: a store still can, because both set SO_REUSEADDR, and nobody else gets it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
