import errno
import signal

import pytest

from trainkit.job import disk_errors
from trainkit.job.node.preflight import PreflightFailed

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(disk_errors.processes, "wait_unless_told", lambda delay_s: None)


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
    assert disk_errors.retry_on_disk_error(fails(error, error, error), said.append) == "done"
    assert said == [f"{error}; trying again for 300 s"]


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "no"), PreflightFailed("sick", is_node=True)])
def test_anything_else_is_raised_at_once(error):
    with pytest.raises(type(error)):
        disk_errors.retry_on_disk_error(fails(error), lambda text: None)


def test_patience_ends(monkeypatch):
    monkeypatch.setattr(disk_errors, "PATIENCE_S", -1.0)
    with pytest.raises(OSError, match="No space"):
        disk_errors.retry_on_disk_error(fails(FULL), lambda text: None)


def test_a_notice_ends_the_wait(monkeypatch):
    monkeypatch.setattr(disk_errors.processes, "wait_unless_told", lambda delay_s: signal.SIGTERM)
    with pytest.raises(OSError, match="No space"):
        disk_errors.retry_on_disk_error(fails(FULL), lambda text: None)
