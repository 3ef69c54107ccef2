"""The lies. A lie is a planted fault: one small wrong change, and the chapters whose cells have to notice it.

Each lie is a function under the decorator ``@lie(chapters, words, …)``, which registers it in ``LIES``. The function's
docstring is its line in the book. There are two kinds:

- With ``module="torch.x"``, the function gets this module of torch or of helpers when a process has just imported it.
  It replaces a function or an attribute there, often by ``@instead_of(owner, name)``: the decorated function is then
  called in place of ``owner.name``. It gets the replaced function as its first argument, ``original``, and after that
  the caller's arguments.
- With ``notebook=True``, the function gets the text of the chapter's notebook file, and returns it with one line
  changed.

Every process of a sabotaged run imports this package, so it imports little. The names of its files end in "lies.py": by
this first_failure.py recognizes an error that a lie itself has raised, because a rank's error has only a file's name.
"""

import importlib

from sabotage.lies.telling_lies import LIES, Lie

__all__ = ["LIES", "Lie"]

for part in ("groups", "loaders", "ddp", "fsdp", "checkpoints", "trainers", "debugging", "parallel", "planning"):
    importlib.import_module(f"sabotage.lies.{part}_lies")  # in the order of the record
