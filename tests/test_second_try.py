"""Tests that failed slow tests get a second try, and that flaky ones are named."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pathlib
import pytest

def fails_every_second_time(name):
    seen = pathlib.Path(__file__).with_name(name)
    if not seen.exists():
        seen.touch()
        print("what it printed")
        raise ValueError("the first time")
    seen.unlink()

@pytest.mark.slow
@pytest.mark.xdist_group("one process")
@pytest.mark.parametrize("number", range({num_flaky}))
def test_flaky(number):
    fails_every_second_time(f"seen-{{number}}")

@pytest.mark.slow
def test_good(): pass
"""
ALWAYS = """
@pytest.mark.slow
def test_bad(): raise ValueError("every time")
"""
FAST = """
def test_fast(): fails_every_second_time("fast")
"""


@pytest.fixture(autouse=True)
def plugin_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))


def run(pytester: pytest.Pytester, tests: str, *options: str) -> pytest.RunResult:
    """Return pytest's output with the plugin for a file of tests."""
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    xdist_group\n")
    pytester.makeconftest('pytest_plugins = ["tools.second_try"]')
    pytester.makepyfile(test_it=tests)
    return pytester.runpytest_subprocess("--dist=loadgroup", *options)


def test_flaky_tests_are_named_and_others_fail(pytester: pytest.Pytester) -> None:
    done = run(pytester, TESTS.format(num_flaky=2), "--second-try", "--numprocesses=2")
    assert done.ret == 0
    done.stdout.fnmatch_lines(
        [
            "*= flaky =*",
            "*test_it.py::test_flaky?0? failed once, then passed alone*",
            "*ValueError: the first time*",
            "what it printed",
            "add to tests/flaky.md: test_it.py::test_flaky?0?, test_it.py::test_flaky?1?",
            "*= 1 passed, 2 flaky in *",
        ]
    )
    done = run(pytester, TESTS.format(num_flaky=3) + ALWAYS + FAST, "--second-try")
    assert done.ret == 1
    done.stdout.fnmatch_lines(["error: 3 tests are flaky, and at most 2 may be"])
    done.stdout.fnmatch_lines(["FAILED test_it.py::test_bad - ValueError: every time"])
    done.stdout.fnmatch_lines(["*= 2 failed, 1 passed, 3 flaky in *"])  # a fast test has one try
