"""Tests that private APIs of torch are used in one file, where a new release of torch is checked."""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed.checkpoint.staging import StagingOptions

from tests.support.programs import run_program
from trainkit.trainer.torch_private import make_stager

ROOT = Path(__file__).resolve().parents[2]
THE_FILE = ROOT / "trainkit/trainer/torch_private.py"
FILES = [path for path in sorted((ROOT / "trainkit").rglob("*.py")) if path != THE_FILE]
IN_TEXT = re.compile(r"(?s)_[A-Za-z]\w*|.*\btorch\.(\w+\.)*_[A-Za-z].*")
"""Matches a string that is a private name, as for getattr, or code that names one of torch's."""
SLOW = {
    "torch.distributed.pipelining",
    "torch.distributed._tools.mem_tracker",
    "torch._dynamo",
    "torch._inductor",
}
"""Modules that only some runs need.

Importing them would add at least a quarter to the start-up time of every rank.
"""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def uses(tree: ast.Module, *, trains: bool) -> Iterator[tuple[int, str]]:
    """Yield the line and the private name of each use of torch in a module.

    Set `trains` if the module handles torch's objects.
    """
    nodes = list(ast.walk(tree))
    others = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] != "torch"
    }
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and on_self(node)}
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if re.match(r"torch\b.*\._", a.name))
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "torch":
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                if any(map(is_private, name.split("."))):
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and trains and not on_self(node):
            of_other_module = isinstance(node.value, ast.Name) and node.value.id in others
            if node.attr not in own and not of_other_module:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and trains and IN_TEXT.fullmatch(str(node.value)):
            yield node.lineno, repr(node.value)


def on_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def overrides(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield the class and private name of each attribute that a subclass shares with its torch class."""
    for kind in vars(module).values():
        if not inspect.isclass(kind) or kind.__module__ != module.__name__:
            continue
        bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] == "torch"]
        taken = {name for base in bases for name in own_names(base)}
        yield from ((kind.__name__, name) for name in sorted(own_names(kind) & taken))


@cache
def own_names(kind: type) -> set[str]:
    """Return the private names that a class defines, or sets on its instances."""
    try:
        found = re.findall(r"self\.(_\w+)", inspect.getsource(kind))
    except (OSError, TypeError):
        found = []
    by_metaclasses = {"_abc_impl", "_is_protocol", "_is_runtime_protocol", "_backward_cls"}
    return {name for name in (*vars(kind), *found) if is_private(name)} - by_metaclasses


def test_each_says_what_to_do_when_it_goes() -> None:
    body = ast.parse(THE_FILE.read_text()).body
    found: dict[str, str] = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign) and isinstance(after, ast.Expr):
            found[ast.unparse(node.targets[0])] = ast.literal_eval(after.value)
    public = {name: text for name, text in found.items() if not name.startswith("_")}
    assert len(public) > 15
    foreseen = re.compile(r"\bIf (torch|a release of torch|the constructor)\b|\btorch 2\.\d+\b")
    assert [name for name, text in public.items() if not foreseen.search(text)] == []


def test_a_stager_keeps_its_buffers_until_it_is_closed() -> None:
    state = {"weight": torch.ones(1000), "step": torch.zeros(())}
    stager: Any = make_stager(StagingOptions(False, False, True, False))
    staged = [stager.stage(state).result()["weight"] for _ in range(3)]
    assert len({tensor.data_ptr() for tensor in staged}) == 1
    buffers = stager._state_dict_stager._cached_storage_mapping
    assert len(buffers) == 2
    stager.close()
    assert len(buffers) == 0


def test_no_other_file_names_one() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in FILES
        if "torch" in (source := path.read_text())
        for line, name in uses(ast.parse(source), trains="trainer" in path.parts)
    ]
    assert found == []


def test_no_class_replaces_one_of_its_base() -> None:
    found = []
    for path in FILES:
        if "trainer" in path.parts:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found += [f"{name}.{kind}.{attr}" for kind, attr in overrides(importlib.import_module(name))]
    assert found == []


def test_such_names_are_found(tmp_path: Path) -> None:
    source = """
import os, torch._inductor
from torch._subclasses import FakeTensor
from torch.distributed.distributed_c10d import Store, _get_default_group
from torch.distributed.tensor.parallel import ParallelStyle
os._exit
class Style(ParallelStyle):
    def _apply(self, module, mesh):
        self._own = module._parameters
        return other._own, torch._C, param._spec, getattr(param, "_spec"), "import torch; torch._C._x", "_"
"""
    found = {name for _, name in uses(ast.parse(source), trains=True)}
    assert found == {
        *("torch._inductor", "torch._subclasses.FakeTensor"),
        *("torch.distributed.distributed_c10d._get_default_group", "module._parameters", "torch._C"),
        *("param._spec", "'_spec'", "'import torch; torch._C._x'"),
    }
    file = tmp_path / "styles.py"
    file.write_text(
        "from torch.distributed.tensor.parallel import ParallelStyle\n"
        + source[source.index("class Style") :]
    )
    spec = importlib.util.spec_from_file_location("styles", file)
    assert spec.loader is not None
    module = sys.modules["styles"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        assert list(overrides(module)) == [("Style", "_apply")]
    finally:
        del sys.modules["styles"]


def test_slow_modules_are_imported_by_whom_they_concern() -> None:
    program = "import sys, trainkit.trainer.worker; print(*sys.modules)"
    done = run_program(sys.executable, "-c", program, check=True, cwd=ROOT)
    assert SLOW & set(done.stdout.split()) == set()
