"""In a checkout `verify_gym.x` is the module `miniverl.verify_gym.x`, not a second copy of it. Not part of a wheel.

One object under two names: an error raised by one is caught under the other, and a task drawn by one is graded by the other.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import CodeType, ModuleType
from typing import Any

PACKAGE = __name__.rpartition(".")[0]


class _Alias(Loader):
    """Loads a module by importing another."""

    def __init__(self, target: ModuleSpec) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._target.name)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # the import machinery has just put the alias there

    def get_code(self, name: str) -> CodeType | None:
        """For `python -m verify_gym.cli`."""
        return self._target.loader.get_code(self._target.name)


class _Finder(MetaPathFinder):
    def __init__(self, home: str) -> None:
        self._home = home

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        parent, _, tail = name.rpartition(".")
        if parent != PACKAGE or tail.startswith("_"):
            return None
        found = find_spec(f"{self._home}.{tail}")
        return spec_from_loader(name, _Alias(found), origin=found.origin) if found else None


def point_to(home: str) -> None:
    """Let the submodules of this package be those of `home`.

    Raises
    ------
    ImportError : `home` isn't installed either
    """
    try:
        missing = find_spec(home) is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        raise ImportError(
            f"{PACKAGE} has no modules of its own and {home} isn't installed: install the wheel, or the checkout"
        )
    sys.meta_path.append(_Finder(home))
