"""Tests that private APIs of torch are used in one file, where a new release of torch is checked."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.tensor.parallel import ParallelStyle

from trainkit.trainer.torch_private import make_stager

ROOT = Path(__file__).resolve().parents[2]
THE_FILE = ROOT / "trainkit/trainer/torch_private.py"
FILES = [path for path in sorted((ROOT / "trainkit").rglob("*.py")) if path != THE_FILE]
IN_TEXT = re.compile(r"(?s)_[A-Za-z]\w*|.*\btorch\.(\w+\.)*_[A-Za-z].*")
"""Matches a string that is a private name, as for getattr, or code that names one of torch's."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def uses(tree: ast.Module, *, trains: bool) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each private part of torch that a module uses.

    Set `trains` if the module handles torch's objects, whose attributes then count too.
    """
    nodes = list(ast.walk(tree))
    imports = [
        alias.asname or alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    ]
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and on_self(node)}
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if re.match(r"torch\b.*\._", a.name))
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "torch":
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                if any(map(is_private, name.split("."))):
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute) and trains and is_private(node.attr) and node.attr not in own:
            root = ast.unparse(node.value)
            if root not in ("self", "cls") and (root not in imports or root.startswith("torch")):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and trains and IN_TEXT.fullmatch(str(node.value)):
            yield node.lineno, repr(node.value)


def on_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def overrides(module: ModuleType) -> Iterator[str]:
    """Yield CLASS.NAME for each private name that a class of a module shares with its base class of torch."""
    for kind in vars(module).values():
        if inspect.isclass(kind) and kind.__module__ == module.__name__:
            bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] == "torch"]
            taken = {name for base in bases for name in own_names(base)}
            yield from (f"{kind.__name__}.{name}" for name in sorted(own_names(kind) & taken))


@cache
def own_names(kind: type) -> set[str]:
    """Return the private names that a class defines, or sets on its instances."""
    try:
        found = re.findall(r"self\.(_\w+)", inspect.getsource(kind))
    except (OSError, TypeError):
        found = []
    by_metaclasses = {"_abc_impl", "_is_protocol", "_is_runtime_protocol", "_backward_cls"}
    return {name for name in (*vars(kind), *found) if is_private(name)} - by_metaclasses


def test_a_stager_keeps_its_buffers_until_it_is_closed():
    state = {"weight": torch.ones(1000), "step": torch.zeros(())}
    stager: Any = make_stager(StagingOptions(False, False, True, False))
    staged = [stager.stage(state).result()["weight"] for _ in range(3)]
    assert len({tensor.data_ptr() for tensor in staged}) == 1
    buffers = stager._state_dict_stager._cached_storage_mapping
    assert len(buffers) == 2
    stager.close()
    assert len(buffers) == 0


def test_no_other_file_names_one():
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in FILES
        if "torch" in (source := path.read_text())
        for line, name in uses(ast.parse(source), trains="trainer" in path.parts)
    ]
    assert found == []


def test_no_class_replaces_one_of_its_base():
    names = [path.relative_to(ROOT).with_suffix("").parts for path in FILES if "trainer" in path.parts]
    modules = [importlib.import_module(".".join(parts).removesuffix(".__init__")) for parts in names]
    assert [found for module in modules for found in overrides(module)] == []


class Style(ParallelStyle):
    def _apply(self, module: Any, mesh: Any) -> Any:
        self._own = mesh


def test_such_names_are_found():
    source = "import os, torch._inductor\nfrom torch.distributed.distributed_c10d import _get_default_group\n"
    source += "os._exit(0); self._own; param._spec"
    found = [name for _, name in uses(ast.parse(source), trains=True)]
    assert sorted(found) == [
        *("param._spec", "torch._inductor", "torch.distributed.distributed_c10d._get_default_group")
    ]
    assert "Style._apply" in overrides(importlib.import_module(__name__))
