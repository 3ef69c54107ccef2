"""Lies about PyTorch and this project, the cells that notice them, and asserts that cannot fail: ``make sabotage``.

``run`` is the command; ``lies`` and ``load`` reach every process of a sabotaged run, ``recorder`` every process of a
notebook whose asserts ``flips`` has rewritten, so these import little. Only tests import this package, and it imports
nothing of helpers: it changes copies of them.
"""
