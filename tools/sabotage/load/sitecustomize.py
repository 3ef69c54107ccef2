"""Plant a lie, which is one fault in torch or in helpers, in each Python process of a sabotaged run.

At its start Python imports a module of this name by itself, if the module's folder is in PYTHONPATH. So the fault gets
into kernels, forkservers and the processes of torchrun. Ranks are forked with it.

The environment variable WORLD_SIZE_ONE_LIE names the lie (see sabotage/lies), and WORLD_SIZE_ONE_APPLIED the file that
says that it was planted.
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class Sabotage(importlib.abc.MetaPathFinder):
    """An import hook that plants a lie in the one module that the lie patches.

    Python asks the finders in sys.meta_path, in their order, where a module is to be imported from, and this one comes
    first. It lets all modules but one be found as usual. That one is loaded as usual too, and is patched before the
    code that imports it gets it, so that no code can take a function from the module before the lie has replaced it.
    """

    def __init__(self, lie: Any) -> None:
        self.lie = lie

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Tell Python how to import the module ``name``, so that the bug is planted when the module has been imported.

        Python calls this for every module. The bug, ``self.lie``, is for one of them: for all others None is returned,
        and Python asks its own finders. For that one, the spec of Python's own finders is returned, but the module's
        loader also plants the bug when it has executed the module's code.
        """
        if name != self.lie.module:
            return None
        # find_spec asks all finders in sys.meta_path. If this one were still among them, it would call itself without
        # end. It has nothing left to do, because a module is imported only once.
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute_code_of_module = spec.loader.exec_module

        def execute_code_and_plant_the_bug(module: ModuleType) -> None:
            execute_code_of_module(module)
            self.lie.apply(module)
            # sabotage/run.py looks for this file, to know that some process has planted the bug.
            Path(os.environ["WORLD_SIZE_ONE_APPLIED"]).touch()

        # One method of the usual loader is replaced. With a loader of another class, inspect.getsource, which chapters
        # call, might not find the module's source.
        spec.loader.exec_module = execute_code_and_plant_the_bug
        return spec


# The package `sabotage` is in tools/. This folder is removed from sys.path at once, so that the process has the same
# path as without a lie.
sys.path.append(str(Path(__file__).parents[2]))
from sabotage.lies import LIES  # noqa: E402  (after the path)

sys.path.pop()
lie = LIES[os.environ["WORLD_SIZE_ONE_LIE"]]
if not lie.changes_notebook:  # A lie that changes a notebook was written there by sabotage/run.py.
    sys.meta_path.insert(0, Sabotage(lie))
