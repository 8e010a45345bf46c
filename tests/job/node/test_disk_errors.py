import errno
import signal

import pytest

from trainkit.job import processes
from trainkit.job.preflight import PreflightFailed
from trainkit.job.processes import retry_on_disk_error

FULL = OSError(errno.ENOSPC, "No space left on device")
REFUSED = PreflightFailed("full", is_node=False)
REFUSED.__cause__ = FULL


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(processes, "wait_for_notice", lambda delay_s: None)


def fails(*errors):
    left = list(errors)

    def action():
        if left:
            raise left.pop(0)
        return "done"

    return action


@pytest.mark.parametrize("error", [FULL, OSError(errno.EDQUOT, "quota"), REFUSED])
def test_a_full_disk_is_waited_for_and_logged_once(error, monkeypatch):
    lines = []
    monkeypatch.setattr(processes, "log_line", lines.append)
    assert retry_on_disk_error(fails(error, error, error)) == "done"
    assert lines == [f"{error}; retrying for 300 s"]


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "no"), PreflightFailed("sick", is_node=True)])
def test_anything_else_is_raised_at_once(error):
    with pytest.raises(type(error)):
        retry_on_disk_error(fails(error))


def test_patience_ends(monkeypatch):
    monkeypatch.setattr(processes, "DISK_PATIENCE_S", -1.0)
    with pytest.raises(OSError, match="No space"):
        retry_on_disk_error(fails(FULL))


def test_a_notice_ends_the_wait(monkeypatch):
    monkeypatch.setattr(processes, "wait_for_notice", lambda delay_s: signal.SIGTERM)
    with pytest.raises(OSError, match="No space"):
        retry_on_disk_error(fails(FULL))
