"""What holds for all tests: whose machine it is, and what is set there, does not matter to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

pytest_plugins = ["tools.slurm_cluster.plugin"]

FOREIGN = ("TRAINKIT_", "SLURM_", "SBATCH_")
"""Beginnings of variables that would change what trainkit does."""
RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("NO_COLOR", "FORCE_COLOR"),
)


HANDLED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


@pytest.fixture(scope="session", autouse=True)
def own_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An empty home for the list of runs and the user's config, and no variables that mean something."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(FOREIGN) or name in RANK_VARIABLES:
                patch.delenv(name)
        patch.setenv("XDG_STATE_HOME", str(home / "state"))
        patch.setenv("XDG_CONFIG_HOME", str(home / "config"))
        yield


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """What a supervisor that a test calls blocks or ignores, no later test and no child of it inherits."""
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
