"""Every Python process of a sabotaged run imports this module first. It plants the fault of one lie in the process.

The environment variable WORLD_SIZE_ONE_LIE names the lie: see sabotage/lies. This module's folder is in PYTHONPATH, so
kernels, forkservers and torchrun's processes find it. Ranks are forked with the lie.
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class Sabotage(importlib.abc.MetaPathFinder):
    """Imports one module as usual, and changes it before the importing code gets it."""

    def __init__(self, lie: Any) -> None:
        self.lie = lie

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.lie.module:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self.lie.apply(module)
            # Without this file, ``run`` reports that the lie was never applied, so that the chapter proves nothing.
            Path(os.environ["WORLD_SIZE_ONE_APPLIED"]).touch()

        spec.loader.exec_module = exec_module
        return spec


sys.path.append(str(Path(__file__).parents[2]))
from sabotage.lies import LIES  # noqa: E402  (after the path)

sys.path.pop()
lie = LIES[os.environ["WORLD_SIZE_ONE_LIE"]]
if not lie.changes_notebook:
    sys.meta_path.insert(0, Sabotage(lie))
