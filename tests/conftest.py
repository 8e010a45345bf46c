"""Makes all tests independent of the machine and of the environment where they start."""

import gc
import itertools
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support import said

hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# Importing all tests allocates a lot and frees little, so garbage collection would take a third of the time.
gc.disable()

pytest_plugins = ["tools.slurm_cluster.plugin", "tools.second_try"]

FOREIGN = ("TRAINKIT_", "SLURM_", "SBATCH_")
"""Prefixes of variables that would change what trainkit does."""
FOREIGN_NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("NO_COLOR", "FORCE_COLOR"),
    # With this variable, every process that a test starts would compile all its modules again.
    "PYTHONDONTWRITEBYTECODE",
)

_numbers = itertools.count(1)
HANDLED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


@pytest.fixture(scope="session", autouse=True)
def isolated_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove the variables that trainkit reads, and give this process a home for files that tests share."""
    # Under `make test &`, a shell without job control ignores these signals. `nohup` ignores SIGHUP, and
    # children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(FOREIGN) or name in FOREIGN_NAMES:
                patch.delenv(name)
        _move_in(tmp_path_factory.mktemp("home"), patch)
        # Prepared data is never changed, so all processes of one test run share it.
        folder = tmp_path_factory.getbasetemp()
        is_one_of_many = "PYTEST_XDIST_WORKER" in os.environ
        patch.setenv("XDG_CACHE_HOME", str((folder.parent if is_one_of_many else folder) / "cache"))
        yield


@pytest.fixture(autouse=True)
def home_of_its_own(
    isolated_environment: None, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Give each test a separate home and environment, without the runs or variables of other tests."""
    said.begin(request.node)
    before = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        _move_in(tmp_path_factory.getbasetemp() / "homes" / str(next(_numbers)), patch)
        yield
    # Commands run in this process, and some of them set a variable, such as `--no-color`.
    os.environ.clear()
    os.environ.update(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Check that a test which passed has said every sentence of its table."""
    yield
    said.end(item)


def _move_in(home: Path, patch: pytest.MonkeyPatch) -> None:
    """Set the folders of trainkit's state and config, which need not exist."""
    patch.setenv("XDG_STATE_HOME", str(home / "state"))
    patch.setenv("XDG_CONFIG_HOME", str(home / "config"))


@pytest.fixture(autouse=True)
def restored_signals() -> Iterator[None]:
    """Restore the signals that a supervisor, called by a test, has blocked or ignored."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    yield
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ()) - mask
    while blocked and signal.sigtimedwait(blocked, 0) is not None:
        pass
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first, and alternate tests that wait for Slurm with tests that compute.

    A long test at the end would delay the whole run, and so would workers that all wait first and all compute
    later.
    """
    units: dict[str, list[pytest.Item]] = {}
    for item in items:
        group = item.get_closest_marker("xdist_group")
        units.setdefault(group.args[0] if group else item.nodeid, []).append(item)
    longest_first = sorted(units.values(), key=lambda unit: -sum(map(_seconds, unit)))
    items[:] = [item for unit in _side_by_side(longest_first) for item in unit]


def pytest_collection_finish() -> None:
    """Exclude all current objects from garbage collection."""
    gc.freeze()
    gc.enable()


def _side_by_side(units: list[list[pytest.Item]]) -> list[list[pytest.Item]]:
    """Alternate units with and without a cluster, so that both kinds end at about the same time."""
    starts: list[tuple[float, list[pytest.Item]]] = []
    for waits in (True, False):
        kind = [unit for unit in units if (unit[0].get_closest_marker("cluster") is not None) == waits]
        begins = [0.0, *itertools.accumulate(sum(map(_seconds, unit)) for unit in kind)]
        starts += ((begin / begins[-1], unit) for begin, unit in zip(begins, kind, strict=False))
    return [unit for _, unit in sorted(starts, key=lambda start: start[0])]


def _seconds(item: pytest.Item) -> float:
    marks = list(item.iter_markers("slow"))
    guess = 8.0 if marks else 0.1
    return max((mark.kwargs["seconds"] for mark in marks if "seconds" in mark.kwargs), default=guess)
