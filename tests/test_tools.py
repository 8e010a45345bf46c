"""Tests the tools: the selection of changed tests, second tries of flaky tests, and man pages."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.support.programs import run_program
from tools import changed_tests
from tools.changed_tests import main, select_tests
from tools.man_pages import escaped, pages
from trainkit.cli.main import COMMANDS, cli

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[1]
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


FLAKY = """
import pathlib
import pytest

def fails_every_second_time(name):
    seen = pathlib.Path(__file__).with_name(name)
    if not seen.exists():
        seen.touch()
        raise ValueError("the first time")

@pytest.mark.slow
@pytest.mark.xdist_group("one process")
@pytest.mark.parametrize("number", range({num_flaky}))
def test_flaky(number): fails_every_second_time(f"seen-{{number}}")
"""
OTHERS = """
@pytest.mark.slow
def test_bad(): raise ValueError("every time")

def test_fast(): fails_every_second_time("fast")
"""


@pytest.mark.parametrize(
    ("tests", "options", "code", "lines"),
    [
        (FLAKY.format(num_flaky=1), ["--numprocesses=1"], 0, ["*= 1 flaky in *"]),
        (FLAKY.format(num_flaky=1) + OTHERS, [], 1, ["*= 2 failed, 1 flaky in *"]),  # a fast test has one try
        (FLAKY.format(num_flaky=3), [], 1, ["error: 3 tests are flaky, and at most 2 may be"]),
    ],
    ids=["one flaky test", "others that fail", "three flaky tests"],
)
def test_flaky_tests_are_named_and_others_fail(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    tests: str,
    options: list[str],
    code: int,
    lines: list[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    xdist_group\n")
    pytester.makeconftest('pytest_plugins = ["tools.second_try"]')
    pytester.makepyfile(test_it=tests)
    done = pytester.runpytest_subprocess("--dist=loadgroup", "--second-try", *options)
    assert done.ret == code
    named = ["*= flaky =*", "*test_it.py::test_flaky?0? failed once, then passed alone*"]
    done.stdout.fnmatch_lines([*named, "*ValueError: the first time*", *lines])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("man") / "man1"
    run_program(sys.executable, "-m", "tools.man_pages", folder, cwd=ROOT, check=True)
    return folder


def test_every_command_has_a_page(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names >= {"trainkit.1", "trainkit-ckpt-verify.1", *(f"trainkit-{name}.1" for name in COMMANDS)}


def test_a_page_has_the_text_of_the_help(folder: Path) -> None:
    page = (folder / "trainkit-submit.1").read_text().replace("\\-", "-")
    command = cli.get_command(click.Context(cli), "submit")
    assert command is not None
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.opts[0] in page
            assert escaped(str(option.help)).replace("\\-", "-") in page
            assert "-h, --help" in page
    headings = re.findall(r"^\.SH (.*)", page, re.MULTILINE)
    assert headings[:3] == ["NAME", "SYNOPSIS", "DESCRIPTION"]
    assert headings[3:] == ["WHAT", "WHERE", "HOW", "OUTPUT", "EXAMPLES", "SEE ALSO"]
    assert "EXIT CODES" in (folder / "trainkit.1").read_text()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a-b", "a\\-b"),
        (".x", "\\&.x"),
        ("'x", "\\&'x"),
        ("a\\b", "a\\eb"),
        ("x.", "x."),
        ("a…", "a\\[u2026]"),
    ],
)
def test_special_characters(text: str, found: str) -> None:
    assert escaped(text) == found


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff formats man pages")
def test_groff_formats_every_page_without_warnings(folder: Path) -> None:
    done = run_program("groff", "-man", "-Tutf8", "-ww", *sorted(folder.iterdir()))
    assert (done.returncode, done.stderr) == (0, "")
    shown = re.sub(r"\x1b\[[\d;]*m|.\x08", "", done.stdout)
    assert "trainkit submit --nodes 2 --follow" in shown
    assert len(list(pages())) == len(list(folder.iterdir()))
