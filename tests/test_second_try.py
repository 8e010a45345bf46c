"""Tests that failed slow tests get a second try, and that flaky ones are named."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

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
        # A fast test has one try.
        (
            FLAKY.format(num_flaky=3) + OTHERS,
            [],
            1,
            ["error: 3 tests are flaky, and at most 2 may be", "*= 2 failed, 3 flaky in *"],
        ),
    ],
    ids=["one flaky test", "three flaky and two bad tests"],
)
def test_flaky_tests_are_named_and_others_fail(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    tests: str,
    options: list[str],
    code: int,
    lines: list[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    xdist_group\n")
    pytester.makeconftest('pytest_plugins = ["tools.second_try"]')
    pytester.makepyfile(test_it=tests)
    done = pytester.runpytest_subprocess("--dist=loadgroup", "--second-try", *options)
    assert done.ret == code
    named = ["*= flaky =*", "*test_it.py::test_flaky?0? failed once, then passed alone*"]
    done.stdout.fnmatch_lines([*named, "*ValueError: the first time*", *lines])
