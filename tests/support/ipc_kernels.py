"""Kernels on sockets in a folder, for nbval (the root conftest.py).

jupyter_client looks for five free ports, and the kernel takes them later. Meanwhile the ranks of other tests take ports
all the time, and a kernel that finds one taken dies.
"""

import tempfile
import uuid
from pathlib import Path
from typing import Any

from jupyter_client import KernelManager


class SocketKernelManager(KernelManager):
    """A manager whose kernel listens on sockets in a folder."""

    def __init__(self, **options: Any) -> None:
        address = Path(tempfile.gettempdir(), f"kernel-{uuid.uuid4().hex[:12]}")
        super().__init__(transport="ipc", ip=str(address), **options)
