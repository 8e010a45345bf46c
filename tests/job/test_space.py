import errno
import signal

import pytest

from trainkit.job import space
from trainkit.job.preflight_error import PreflightFailed

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(space.children, "wait_unless_told", lambda delay_s: None)


def fails(*errors):
    left = list(errors)

    def action():
        if left:
            raise left.pop(0)
        return "done"

    return action


@pytest.mark.parametrize(
    "error", [FULL, OSError(errno.EDQUOT, "quota"), PreflightFailed("full", is_node=False)]
)
def test_room_is_waited_for_and_said_once(error):
    said = []
    assert space.when_disk_allows(fails(error, error, error), said.append) == "done"
    assert said == [f"{error}; trying again for 300 s"]


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "no"), PreflightFailed("sick", is_node=True)])
def test_anything_else_is_raised_at_once(error):
    with pytest.raises(type(error)):
        space.when_disk_allows(fails(error), lambda text: None)


def test_patience_ends(monkeypatch):
    monkeypatch.setattr(space, "PATIENCE_S", -1.0)
    with pytest.raises(OSError, match="No space"):
        space.when_disk_allows(fails(FULL), lambda text: None)


def test_a_notice_ends_the_wait(monkeypatch):
    monkeypatch.setattr(space.children, "wait_unless_told", lambda delay_s: signal.SIGTERM)
    with pytest.raises(OSError, match="No space"):
        space.when_disk_allows(fails(FULL), lambda text: None)
