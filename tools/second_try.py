"""Pytest plugin for ``--second-try``: run a failed slow test once more, alone, after all other tests.

A test that passes on the second try is reported as flaky, so a temporary slowdown of the machine does not
fail the session, but remains visible. The plugin prints the names and the first tracebacks of flaky tests.
The session fails if more than MAX_FLAKY tests are flaky.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

MAX_FLAKY = 2
MAX_TRIES = 10
"""Maximum number of failed tests that are retried. If more tests fail, a temporary slowdown is not the cause,
and retries would take long."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--second-try",
        action="store_true",
        help=f"run slow tests that fail once more, alone, at the end; more than {MAX_FLAKY} flaky ones fail",
    )


@pytest.hookimpl(trylast=True)  # run after the worker processes and their clusters have been shut down
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Run the failed slow tests once more, and report tests that pass as flaky instead of failed."""
    config = session.config
    is_asked = config.getoption("--second-try") and not hasattr(config, "workerinput")
    if not is_asked or exitstatus != pytest.ExitCode.TESTS_FAILED:
        return
    stats = config.pluginmanager.getplugin("terminalreporter").stats
    kinds = [kind for kind in ("failed", "error") if kind in stats]
    failed: dict[str, pytest.TestReport] = {}
    for report in (report for kind in kinds for report in stats[kind]):
        failed.setdefault(report.nodeid, report)
    slow = [nodeid for nodeid, report in failed.items() if "slow" in getattr(report, "keywords", ())]
    if len(slow) > MAX_TRIES:
        return
    flaky = [nodeid for nodeid in slow if _passes_alone(config, nodeid)]
    for kind in kinds:
        stats[kind] = [report for report in stats[kind] if report.nodeid not in flaky]
        if not stats[kind]:
            del stats[kind]
    if flaky:
        stats["flaky"] = [failed[nodeid] for nodeid in flaky]
    if len(flaky) == len(failed) <= MAX_FLAKY:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the flaky tests with their first tracebacks."""
    flaky = terminalreporter.stats.get("flaky", [])
    if not flaky:
        return
    terminalreporter.section("flaky")
    names = [_without_group(report.nodeid) for report in flaky]
    for name, report in zip(names, flaky, strict=True):
        terminalreporter.write_sep("_", f"{name} failed once, then passed alone")
        terminalreporter.write_line(report.longreprtext)
        for title, text in report.sections:
            terminalreporter.write_sep("-", title)
            terminalreporter.write_line(text)
    if len(flaky) > MAX_FLAKY:
        problem = f"error: {len(flaky)} tests are flaky, and at most {MAX_FLAKY} may be"
        terminalreporter.write_line(problem, red=True, bold=True)
    terminalreporter.write_line(f"add to tests/flaky.md: {', '.join(names)}")


def _passes_alone(config: pytest.Config, nodeid: str) -> bool:
    """Return whether a test passes in a separate process while no other test runs."""
    options = [f"--slurm={version}"] if (version := config.getoption("--slurm", None)) else []
    argv = [sys.executable, "-m", "pytest", "--no-header", *options, _without_group(nodeid)]
    print(f"\n\nsecond try: {_without_group(nodeid)}", flush=True)
    return subprocess.run(argv, cwd=config.rootpath).returncode == pytest.ExitCode.OK


def _without_group(nodeid: str) -> str:
    """Return the name of a test without the ``@group`` that pytest-xdist appends."""
    return re.sub(r"@[^\]]+$", "", nodeid)
