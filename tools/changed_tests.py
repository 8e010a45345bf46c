"""Run the unit tests that depend on changed files: ``python -m tools.changed_tests [BASE] [-- PYTEST_ARGS]``.

A file is considered changed if it differs from the merge base of the branch and BASE; uncommitted and
untracked files are included. BASE defaults to the upstream of the branch or, if there is none, to ``main``.

A test depends on the files that it imports directly, through other files of tests/ and tools/, or through
files of the same package in trainkit. For example, a change to plan/batch.py selects the tests of
plan/make_plan.py, but not the tests of every command. A changed file that is not a Python module selects the
tests whose source contains the name of the file or of its top-level folder. `make test` runs all unit tests.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ("-m", "pytest", "--dist", "loadgroup", "--numprocesses", "2", "-m", "not slow")
NO_TESTS = 5
"""Exit code of pytest if all tests are deselected."""


def imports_of(source: str) -> set[str]:
    """Return the dotted names that a module imports, even in functions; ``from a import b`` also adds a.b."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def select_tests(changed: Iterable[str], sources: dict[str, str], python_path: Sequence[str]) -> list[str]:
    """Return the test files that the changed files can break; `sources` maps every path to its content."""
    modules = {}
    for path in sources:
        for folder in python_path:
            if path.endswith(".py") and (folder == "." or path.startswith(f"{folder}/")):
                inside = path if folder == "." else path.removeprefix(f"{folder}/")
                modules[inside[:-3].replace("/", ".").removesuffix(".__init__")] = path
    imported = {
        path: {modules[name] for name in imports_of(source) if name in modules}
        for path, source in sources.items()
        if path.endswith(".py")
    }
    texts = {path for path in changed if not path.endswith(".py")}
    words = {PurePath(path).name for path in texts} | {path.split("/")[0] for path in texts if "/" in path}
    is_named = re.compile("|".join(rf"[\"'/]{re.escape(word)}[\"'/]" for word in sorted(words)) or r"(?!)")
    changed = set(changed)
    selected = []
    for test in filter(is_test, imported):
        seen = {test, *(conftest for conftest in _conftests(test) if conftest in imported)}
        todo = list(seen)
        for path in todo:
            new = {other for other in imported[path] if _follows(path, other)} - seen
            seen |= new
            todo += new
        if seen & changed or is_named.search(sources[test]):
            selected.append(test)
    return sorted(selected)


def is_test(path: str) -> bool:
    """Return whether pytest collects the file."""
    return path.startswith("tests/") and PurePath(path).name.startswith("test_") and path.endswith(".py")


def _conftests(test: str) -> list[str]:
    # Omit the top-level conftest.py, because every test would otherwise depend on the imports of its plugins.
    return [f"{folder}/conftest.py" for folder in PurePath(test).parents if str(folder) not in (".", "tests")]


def _follows(path: str, other: str) -> bool:
    """Return whether the imports of a file are added to the imports of the tests that import the file."""
    return not path.startswith("trainkit/") or path.split("/")[:2] == other.split("/")[:2]


def _git(*args: str) -> list[str]:
    """Return the entries in the output of a git command, separated by NUL or newlines; [] if it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True)
    return [line for line in re.split("[\0\n]", done.stdout) if line] if done.returncode == 0 else []


def _sources(untracked: Sequence[str] = ()) -> dict[str, str]:
    """Map the path of each Python file in the checkout to its text."""
    paths = [path for path in (*_git("ls-files", "-z"), *untracked) if path.endswith(".py")]
    return {path: (ROOT / path).read_text(errors="replace") for path in paths if (ROOT / path).exists()}


def _python_path() -> Sequence[str]:
    """Return the folders that pytest adds to ``sys.path``."""
    found = re.search(r"^pythonpath = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    folders: Sequence[str] = ast.literal_eval(found[1])
    return folders


def tests_of(path: str) -> list[str]:
    """Return the test files that a change to a file can break; the tests with the file's name come first."""
    folder = f"tests/{PurePath(path).parent.relative_to('trainkit')}/"
    selected = select_tests([path], _sources(), _python_path())
    return sorted(selected, key=lambda test: (not test.startswith(folder), test))


def main(args: Sequence[str]) -> int:
    """Print and run the selected tests; return the exit code of pytest, or 0 if no test is selected."""
    split = args.index("--") if "--" in args else len(args)
    refs = args[:split] or ("@{upstream}", "main")
    base = next((found[0] for ref in refs if (found := _git("merge-base", "HEAD", ref))), None)
    if base is None:
        print(f"error: HEAD shares no commit with {' or '.join(refs)}", file=sys.stderr)
        return 2
    untracked = _git("ls-files", "-z", "--others", "--exclude-standard")
    changed = [*_git("diff", "--name-only", "--no-renames", "-z", base), *untracked]
    sources = _sources(untracked)
    selected = select_tests(changed, sources, _python_path())
    print(f"changed files since {base[:10]}: {len(changed)}; test files that import them: {len(selected)}")
    slow = [path for path in selected if re.search(r"mark\.slow|on_slurm|on_cluster", sources[path] + path)]
    if slow:
        print(f"their slow tests: .venv/bin/python -m pytest -m slow {' '.join(slow)}")
    if not selected:
        return 0
    sys.stdout.flush()
    code = subprocess.run([sys.executable, *PYTEST, *args[split + 1 :], *selected], cwd=ROOT).returncode
    return 0 if code == NO_TESTS else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
