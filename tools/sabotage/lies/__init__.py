"""The lies: each is a small wrong change, with the chapters whose cells have to notice it.

A lie about torch or about helpers gets a module that has just been imported, and replaces a function or an attribute by
its name. A lie about a chapter's own lines gets the text of the notebook's file and returns a changed text: it quotes
the line that it changes. Every process of a sabotaged run imports this package, so it imports little. Its files end in
"lies.py", because first_failure.py knows an error of a lie by this: a rank tells only the file's name.
"""

import importlib

from sabotage.lies.telling_lies import LIES, Lie

__all__ = ["LIES", "Lie"]

for part in ("groups", "loaders", "ddp", "fsdp", "checkpoints", "trainers", "debugging", "parallel", "planning"):
    importlib.import_module(f"sabotage.lies.{part}_lies")  # in the order of the record
