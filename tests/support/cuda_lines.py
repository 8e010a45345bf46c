"""Finds the statements of trainkit that run only on a GPU, or differently there, in its syntax trees.

The value of a condition on a CPU is followed through names, keyword arguments and results of functions. A
statement that a CPU never reaches is under a CUDA condition.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PRODUCT = Path(__file__).parents[2] / "trainkit"
LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True, order=True)
class Statement:
    """A statement of a file. If the statement has a body, only its head counts."""

    file: str
    function: str
    line: int
    last: int
    text: str
    """The first line of the statement."""


class _OnCpu:
    """Evaluates expressions that depend on the device, as they are on a CPU."""

    def __init__(self) -> None:
        self.values: dict[str, bool] = {}
        """Maps attributes, keyword arguments, functions, and (file, name) pairs to values on a CPU."""
        self.unset: set[str] = set()
        """Attributes that are None on a CPU."""
        self.devices: dict[str, bool] = {}
        """Maps the name of a set of devices, such as ``COMPILED_DEVICES``, to whether it contains the CPU."""
        self.file = ""

    def value(self, node: ast.expr | None) -> bool | None:
        """Return the value of an expression, or None if the value depends on more than the device."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            found = self.value(node.operand)
            return None if found is None else not found
        if isinstance(node, ast.BoolOp):
            values, ends = [self.value(item) for item in node.values], isinstance(node.op, ast.Or)
            return ends if ends in values else None if None in values else not ends
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            has_cpu = self._has_cpu(node.comparators[0])
            return None if has_cpu is None else has_cpu == isinstance(node.ops[0], ast.In)
        if isinstance(node, ast.Compare) and isinstance(node.comparators[0], ast.Constant):
            wanted = node.comparators[0].value
            if wanted in ("cpu", "cuda") and isinstance(node.ops[0], ast.Eq | ast.NotEq):
                return (wanted == "cpu") == isinstance(node.ops[0], ast.Eq)
            if wanted is None and getattr(node.left, "attr", "") in self.unset:
                return isinstance(node.ops[0], ast.Is)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.cuda.is_available":
            return False
        named = node.func if isinstance(node, ast.Call) else node
        if isinstance(named, ast.Attribute) and named is node:
            return self.values.get(named.attr)
        if isinstance(named, ast.Name):
            return self.values.get(f"{self.file}:{named.id}", self.values.get(named.id))
        return None

    def _has_cpu(self, node: ast.expr) -> bool | None:
        """Return whether the CPU is one of these devices, or None if they contain neither CPU nor GPU."""
        if isinstance(node, ast.Name):
            return self.devices.get(node.id)
        items = node.elts if isinstance(node, ast.Tuple | ast.Set | ast.List) else []
        found = {item.value for item in items if isinstance(item, ast.Constant)} & {"cpu", "cuda"}
        return "cpu" in found if len(found) == 1 else None

    def learn(self, tree: ast.Module) -> None:
        """Follow the conditions of a file one step further."""
        reached, set_to = self.reached_in(tree), defaultdict(set)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                is_none = isinstance(node.value, ast.Constant) and node.value.value is None
                set_to[getattr(target, "attr", "")].add((node in reached, is_none))
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
                parts = [(target, value)]
                has_cpu = self._has_cpu(value)
                if isinstance(target, ast.Name) and has_cpu is not None:
                    self.devices[target.id] = has_cpu
                if isinstance(value, ast.Tuple) and isinstance(target, ast.Tuple):
                    parts = [*zip(target.elts, value.elts, strict=True)]
                for at, item in parts:
                    if isinstance(at, ast.Name | ast.Attribute):
                        self._learn(
                            at.attr if isinstance(at, ast.Attribute) else f"{self.file}:{at.id}", item
                        )
            elif isinstance(node, ast.keyword) and node.arg:
                self._learn(node.arg, node.value)
            elif isinstance(node, ast.FunctionDef):
                self._learn_function(node)
        self.unset |= {name for name, ways in set_to.items() if ways == {(True, True), (False, False)}} - {""}

    def reached_in(self, tree: ast.Module) -> set[ast.stmt]:
        """Return all statements that a CPU may reach if each function is called."""
        bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.Module | ast.FunctionDef)]
        return {statement for body in bodies for statement in self.reached(body)}

    def _learn(self, name: str, value: ast.expr) -> None:
        found = self.value(value)
        if found is not None:
            self.values[name] = found

    def _learn_function(self, function: ast.FunctionDef) -> None:
        """Give a function a value if all returns that a CPU reaches have the same one."""
        reached = [item for item in self.reached(function.body) if isinstance(item, ast.Return)]
        values = {
            bool(item.value.value) if isinstance(item.value, ast.Constant) else self.value(item.value)
            for item in reached
        }
        depends = any(not isinstance(item.value, ast.Constant) for item in reached) or len(reached) < sum(
            isinstance(node, ast.Return) for node in ast.walk(function)
        )
        if len(values) == 1 and depends and (found := values.pop()) is not None:
            self.values[function.name] = found

    def reached(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        """Return the statements that a CPU may reach, with the statements inside them."""
        for statement in body:
            yield statement
            test = self.value(statement.test) if isinstance(statement, ast.If) else None
            for name in ("body", "orelse", "finalbody"):
                if not isinstance(statement, ast.If) or test is not (name == "orelse"):
                    yield from self.reached(getattr(statement, name, []))
            for inner in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
                yield from self.reached(inner.body)
            if isinstance(statement, ast.If) and test and isinstance(statement.body[-1], LEAVING):
                return
            if isinstance(statement, LEAVING):
                return

    def mentions(self, statement: ast.stmt) -> bool:
        """Return whether the head of a statement tests the device or refers to CUDA."""
        parts = [statement.value] if isinstance(statement, ast.AnnAssign) else ast.iter_child_nodes(statement)
        return any(
            isinstance(node, ast.expr) and (self.value(node) is not None or ast.unparse(node) == "torch.cuda")
            for part in parts
            if part is not None and not isinstance(part, ast.stmt | ast.ExceptHandler)
            for node in ast.walk(part)
        )


def cuda_statements(folder: Path = PRODUCT) -> list[Statement]:
    """Return the statements under a CUDA condition in all files of a folder that import torch."""
    texts = {path: path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))}
    trees = {
        path: ast.parse(text)
        for path, text in texts.items()
        if re.search(r"^\s*import torch\b", text, re.MULTILINE)
    }
    known = _OnCpu()
    before = -1
    while len(known.values) != before:
        before = len(known.values)
        for path, tree in trees.items():
            known.file = str(path)
            known.learn(tree)
    found = []
    for path, tree in trees.items():
        lines, known.file = texts[path].splitlines(), str(path)
        reached = known.reached_in(tree)
        # The inner functions come later.
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        owners = {node: function.name for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            if node not in reached or known.mentions(node):
                body = getattr(node, "body", None)
                last = body[0].lineno - 1 if body else node.end_lineno or 0
                place = path.relative_to(folder).as_posix(), owners.get(node, "")
                found.append(
                    Statement(*place, node.lineno, max(last, node.lineno), lines[node.lineno - 1].strip())
                )
    return sorted(found)


def not_run(ran: set[tuple[str, int]], folder: Path = PRODUCT) -> list[Statement]:
    """Return the statements under a CUDA condition that contain none of these lines, (file, number)."""
    return [
        item
        for item in cuda_statements(folder)
        if not any((item.file, line) in ran for line in range(item.line, item.last + 1))
    ]


if __name__ == "__main__":
    for statement in cuda_statements():
        print(f"{statement.file}:{statement.line} {statement.function}: {statement.text}")
