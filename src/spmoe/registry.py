"""Registries: prefetch policies, eviction policies, drafters and weight formats by name.

A name is registered in one of three ways. A module of the registry's package carries it: `draft_gate.py` registers
`draft-gate`; modules whose names start with an underscore, and `base.py`, are helpers. An entry point of another
distribution carries it, in the registry's group. Or a program calls `register`. Listing names imports no module, so
that the command line can check an option before it imports torch.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from spmoe.errors import UsageError

ON_DEMAND = "on-demand"  # the prefetch policy without needs, which every chain of fallbacks ends with

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes of one kind by name. A class learns its name, as `cls.name`, when it is registered."""

    def __init__(self, kind: str, package: str, group: str) -> None:
        self.kind = kind  # as messages call it, such as "prefetch policy"
        self._package = package
        self._group = group
        self._classes: dict[str, type[T]] = {}

    def names(self) -> tuple[str, ...]:
        """Return every registered name, sorted, without importing its class."""
        return tuple(sorted({*self._module_names, *self._entry_point_names(), *self._classes}))

    def __contains__(self, name: object) -> bool:
        return name in self._classes or name in self._module_names or name in self._entry_point_names()

    def require(self, name: str) -> str:
        """Return the name, or raise UsageError with the names that exist."""
        if name not in self:
            raise UsageError(f"unknown {self.kind} {name!r}; choose one of {', '.join(self.names())}")
        return name

    def load(self, name: str) -> type[T]:
        """Return the class of this name, importing its module first; raise UsageError if there is none."""
        if name not in self._classes:
            if name in self._module_names:
                import_module(f"{self._package}.{self._module_names[name]}")
            else:
                self.require(name)
                point = next(point for point in _find_entry_points(self._group) if point.name == name)
                self.register(name)(point.load())
        return self._classes[name]

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Register the decorated class under this name; a later registration replaces an earlier one."""

        def add(cls: type[T]) -> type[T]:
            cls.name = name  # type: ignore[attr-defined]  # T has no bound
            self._classes[name] = cls
            return cls

        return add

    def _entry_point_names(self) -> set[str]:
        return {point.name for point in _find_entry_points(self._group)}

    @cached_property
    def _module_names(self) -> Mapping[str, str]:
        """Module by registered name."""
        return {path.stem.replace("_", "-"): path.stem for path in self._modules()}

    def _modules(self) -> list[Path]:
        spec = find_spec(self._package)
        folders = spec.submodule_search_locations if spec is not None and spec.submodule_search_locations else []
        files = (path for folder in folders for path in Path(folder).glob("*.py"))
        return [path for path in files if not path.stem.startswith("_") and path.stem != "base"]


class FamilyRegistry(Registry[T]):
    """Classes of which each has several names, the strings in the tuple `NAMES` of its module.

    The tuple is read from the source. A class gets no `name`; it makes one object per name.
    """

    def register(self, *names: str) -> Callable[[type[T]], type[T]]:
        """Register the decorated class under these names."""

        def add(cls: type[T]) -> type[T]:
            self._classes.update(dict.fromkeys(names, cls))
            return cls

        return add

    @cached_property
    def _module_names(self) -> Mapping[str, str]:
        return {name: path.stem for path in self._modules() for name in _literal_names(path)}


def _find_entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group, also of distributions that were installed since the last call."""
    return _read_entry_points(group, tuple((folder, _modified(folder)) for folder in sys.path))


@lru_cache(maxsize=16)  # reading the metadata of every distribution takes longer than checking all other options
def _read_entry_points(group: str, folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


def _modified(folder: str) -> int:
    """Return the time when a folder of `sys.path` changed, in nanoseconds; 0 if there is no such folder."""
    try:
        return os.stat(folder or os.curdir).st_mtime_ns  # noqa: PTH116  # called for every folder, at every look-up
    except OSError:
        return 0


def _literal_names(path: Path) -> tuple[str, ...]:
    """Return the tuple `NAMES` of a module without importing it; empty if there is none."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["NAMES"]:
            names: tuple[str, ...] = ast.literal_eval(node.value)
            return names
    return ()


PREFETCH_POLICIES: Registry[Any] = Registry("prefetch policy", "spmoe.predict.policies", "spmoe.prefetch_policies")
EVICTION_POLICIES: Registry[Any] = Registry("eviction policy", "spmoe.experts.eviction", "spmoe.eviction_policies")
DRAFTERS: Registry[Any] = Registry("drafter", "spmoe.draft", "spmoe.drafters")
WEIGHT_FORMATS: FamilyRegistry[Any] = FamilyRegistry("expert format", "spmoe.formats", "spmoe.weight_formats")
