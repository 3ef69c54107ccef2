"""World Size One's helpers. In a notebook, ``%load_ext helpers`` adds the magic ``%%ranks``.

Importing the package imports nothing else but typing, so that the ranks' forkserver can start before torch does.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(shell: "InteractiveShell") -> None:
    """Start importing torch for the ranks in the background, and register ``%%ranks``."""
    import os

    from helpers.ranks import magic
    from helpers.ranks.ports import LOOPBACK

    # The kernel's process group and the processes that cells start talk over the loopback interface alone.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    magic.load(shell)
