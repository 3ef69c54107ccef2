"""Lies and the cells that notice them: ``make sabotage``. A lie is a fault that is planted in PyTorch or this project.

``run`` is the command. ``lies`` and ``load`` reach every process of a sabotaged run, so these import little. Only tests
import this package, and it imports nothing of helpers: it changes copies of them.
"""
