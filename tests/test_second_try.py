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
IN_SETUP = """
@pytest.fixture
def flaky(): fails_every_second_time("setup")

@pytest.mark.slow
def test_with_a_fixture(flaky): pass
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


@pytest.mark.parametrize("processes", ["0", "2"])
def test_two_flaky_tests_pass_and_are_named(pytester: pytest.Pytester, processes: str) -> None:
    done = run(pytester, TESTS.format(num_flaky=2), "--second-try", f"--numprocesses={processes}")
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


def test_three_flaky_tests_fail(pytester: pytest.Pytester) -> None:
    done = run(pytester, TESTS.format(num_flaky=2) + IN_SETUP, "--second-try")
    assert done.ret == 1
    done.stdout.fnmatch_lines(["error: 3 tests are flaky, and at most 2 may be", "*= 1 passed, 3 flaky in *"])


def test_a_test_that_fails_twice_fails(pytester: pytest.Pytester) -> None:
    done = run(pytester, TESTS.format(num_flaky=1) + ALWAYS, "--second-try")
    assert done.ret == 1
    done.stdout.fnmatch_lines(["FAILED test_it.py::test_bad - ValueError: every time"])
    done.stdout.fnmatch_lines(["*= 1 failed, 1 passed, 1 flaky in *"])


def test_a_fast_test_has_one_try(pytester: pytest.Pytester) -> None:
    done = run(pytester, TESTS.format(num_flaky=0) + FAST, "--second-try")
    assert done.ret == 1
    done.stdout.fnmatch_lines(["*= 1 failed, 1 passed, 1 skipped in *"])
    done.stdout.no_fnmatch_line("second try: *")


def test_without_the_option_there_is_no_second_try(pytester: pytest.Pytester) -> None:
    done = run(pytester, TESTS.format(num_flaky=1))
    assert done.ret == 1
    done.stdout.fnmatch_lines(["*= 1 failed, 1 passed in *"])
