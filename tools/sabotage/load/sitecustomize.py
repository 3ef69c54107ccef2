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
        """Say how Python is to import the module ``name``; None leaves it to the finders that come after this one.

        The module that ``self.lie`` patches is imported as usual, and the lie is then applied to it.
        """
        if name != self.lie.module:
            return None
        # The search below asks all finders again. This one has done its work, and would call itself without end.
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute_the_module = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute_the_module(module)
            self.lie.apply(module)
            # Without this file, ``run`` reports that the lie was never applied, so that the chapter proves nothing.
            Path(os.environ["WORLD_SIZE_ONE_APPLIED"]).touch()

        # Only this method of the loader is replaced, on the loader of this one module. With a loader of another type,
        # inspect.getsource, which chapters call, might not find the module's source.
        spec.loader.exec_module = exec_module
        return spec


# The package `sabotage` is in tools/. The path is taken back at once, so that a process has the one that it has without
# a lie.
sys.path.append(str(Path(__file__).parents[2]))
from sabotage.lies import LIES  # noqa: E402  (after the path)

sys.path.pop()
lie = LIES[os.environ["WORLD_SIZE_ONE_LIE"]]
if not lie.changes_notebook:  # `run` has written the others into the notebook
    sys.meta_path.insert(0, Sabotage(lie))
