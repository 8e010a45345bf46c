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


def test_a_new_test_runs_and_its_exit_code_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(changed_tests, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text('pythonpath = ["."]\n')
    (tmp_path / "tests").mkdir()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    assert main([]) == 0
    (tmp_path / "tests/test_b.py").write_text("def test_b(): assert False\n")
    assert main(["--", "-p", "no:cacheprovider"]) == 1
    assert "1 failed" in capfd.readouterr().out
