"""The lies: each is a small patch of torch or of a helper, with the chapters whose cells have to notice it.

A lie about torch gets a module that has just been imported, and changes it. A lie about a helper or a chapter gets the
text of a file and returns a changed text. Every process of a sabotaged run imports this package, so it imports little.
Its files end in "lies.py": by this first_failure.py knows an error of a lie; a rank tells only the file's name.
"""

import importlib

from sabotage.lies.telling_lies import LIES, Lie

__all__ = ["LIES", "Lie"]

for part in ("groups", "loaders", "ddp", "fsdp", "checkpoints", "trainers", "debugging", "parallel", "planning"):
    importlib.import_module(f"sabotage.lies.{part}_lies")  # in the order of the record
