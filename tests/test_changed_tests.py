"""Tests which tests `make test-changed` selects."""

import subprocess
from pathlib import Path

import pytest

from tools import changed_tests
from tools.changed_tests import main, select_tests

TREE = {
    "trainkit/__init__.py": "",
    "trainkit/plan/batch.py": "import numpy\n",
    "trainkit/plan/make_plan.py": "def plan():\n    from trainkit.plan.batch import size\n",
    "trainkit/cli/submit.py": "from trainkit.plan import make_plan\n",
    "tests/support/runs.py": "from trainkit.plan.make_plan import plan\n",
    "tests/plan/shapes.py": "import trainkit.plan.batch\n",
    "tests/plan/test_batch.py": "from trainkit.plan.batch import size\n",
    "tests/plan/test_shapes.py": "from shapes import shape\n",
    "tests/cli/conftest.py": "from tests.support.runs import run\n",
    "tests/cli/test_status.py": "",
    "tests/data/test_submit.py": "from trainkit.cli.submit import command\nTEXT = 'see docs'\n",
    "tests/test_docs.py": "ROOT / 'docs'\n",
    "tests/test_makefile.py": "run('/Makefile')\n",
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("trainkit/plan/batch.py", "plan/test_batch plan/test_shapes cli/test_status"),
        ("trainkit/plan/make_plan.py", "cli/test_status"),
        ("trainkit/cli/submit.py", "data/test_submit"),
        ("tests/support/runs.py", "cli/test_status"),
        ("tests/plan/shapes.py", "plan/test_shapes"),
        ("tests/cli/test_status.py", "cli/test_status"),
        ("docs/limits.md", "test_docs"),
        ("Makefile", "test_makefile"),
        ("trainkit/gone.py", ""),
    ],
)
def test_tests_are_selected_by_what_they_import(changed, expected):
    files = sorted(f"tests/{name}.py" for name in expected.split())
    assert select_tests([changed], TREE, [".", "tests/plan"]) == files


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkout with one commit on main."""
    monkeypatch.setattr(changed_tests, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text('pythonpath = ["."]\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").write_text("def test_a(): pass\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    return tmp_path


def test_a_new_test_runs_and_its_exit_code_counts(repository, capfd):
    assert main([]) == 0
    assert ": 0; test files that import them: 0\n" in capfd.readouterr().out
    (repository / "tests/test_b.py").write_text("def test_b(): assert False\n")
    assert main(["--", "-p", "no:cacheprovider"]) == 1
    out = capfd.readouterr().out
    assert ": 1; test files that import them: 1\n" in out
    assert "1 failed" in out
