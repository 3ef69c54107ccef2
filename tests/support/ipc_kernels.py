"""nbclient's kernels on sockets in a folder. The root conftest.py does the same for nbval's, and says why."""

import tempfile
import uuid
from pathlib import Path

from jupyter_client import AsyncKernelManager


class SocketKernelManager(AsyncKernelManager):
    """For ``NotebookClient(…, kernel_manager_class=SocketKernelManager)``."""

    def __init__(self, **options):
        address = Path(tempfile.gettempdir(), f"kernel-{uuid.uuid4().hex[:12]}")
        super().__init__(transport="ipc", ip=str(address), **options)
