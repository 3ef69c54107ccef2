"""World Size One's helpers. In a notebook, ``%load_ext helpers`` warms the ranks and gives ``%%ranks``.

Importing the package imports nothing else, so that the ranks' forkserver can start before torch does.
"""


def load_ipython_extension(shell):
    """Start importing torch for the ranks in the background, and register ``%%ranks``."""
    from helpers.ranks import magic

    magic.load(shell)
