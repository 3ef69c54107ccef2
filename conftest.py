"""How all tests run, the notebooks' cells included. What test files share is in tests/conftest.py."""

import os
import tempfile
import uuid
from pathlib import Path

import nbval.kernel
from jupyter_client.manager import KernelManager

# All of them test the CPU's path. They share its cores: an OpenMP thread that waits must sleep, not spin.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_WAIT_POLICY"] = "passive"


def kernel_manager(**options):
    """A notebook's kernel that listens on sockets in a folder.

    jupyter_client looks for five free ports, and the kernel takes them later. Meanwhile the ranks of other tests take
    ports all the time, and a kernel that finds one taken dies.
    """
    address = Path(tempfile.gettempdir(), f"kernel-{uuid.uuid4().hex[:12]}")
    return KernelManager(transport="ipc", ip=str(address), **options)


nbval.kernel.KernelManager = kernel_manager
