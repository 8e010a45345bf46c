import errno
import os
import signal

import pytest

from tests.support.said import said
from trainkit.errors import UsageError
from trainkit.job import processes
from trainkit.job.preflight import PreflightFailed
from trainkit.job.processes import NO_SPACE, retry_on_disk_error
from trainkit.launch.create import new_folder
from trainkit.launch.snapshot import _copy_error
from trainkit.run.files import append_jsonl, read_json, write_json
from trainkit.run.rundir import RunDir

FULL = OSError(errno.ENOSPC, "No space left on device")
REFUSED = PreflightFailed("full", is_node=False)
REFUSED.__cause__ = FULL


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(processes, "wait_for_notice", lambda delay_s: None)


def fails(*errors):
    left = list(errors)

    def action(*_):
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


@pytest.mark.parametrize(
    ("name", "value"), [("DISK_PATIENCE_S", -1.0), ("wait_for_notice", lambda delay_s: signal.SIGTERM)]
)
def test_patience_ends_and_a_notice_ends_the_wait(monkeypatch, name, value):
    monkeypatch.setattr(processes, name, value)
    with pytest.raises(OSError, match="No space"):
        retry_on_disk_error(fails(FULL))


@pytest.mark.parametrize("code", NO_SPACE)
def test_a_full_disk_and_a_full_quota_are_said_alike(code, tmp_path, monkeypatch):
    why, write = os.strerror(code), os.write
    file = tmp_path / "metrics.jsonl"
    append_jsonl(file, {"step": 1})

    def write_some(descriptor, data):
        if bytes(data).startswith(b"{"):
            return write(descriptor, bytes(data)[:3])
        raise OSError(code, why)

    monkeypatch.setattr("os.write", write_some)
    with pytest.raises(OSError, match=why) as caught:
        append_jsonl(file, {"step": 2})
    assert caught.value.errno == code
    monkeypatch.setattr("os.fsync", fails(OSError(code, why)))
    with pytest.raises(OSError, match=why) as caught:
        write_json(tmp_path / "job.json", {"name": "x"})
    assert caught.value.errno == code
    monkeypatch.undo()
    assert read_json(file) == {"step": 1}
    assert not (tmp_path / "job.json").exists()
    message = f"cannot create a run folder at {tmp_path}/new: {why}"
    with pytest.raises(UsageError, match=message) as refused, new_folder("run", tmp_path / "new"):
        raise OSError(code, why)
    assert "quota" in refused.value.hint
    copying = _copy_error(OSError(code, why), RunDir(tmp_path))
    said(copying.message)
    assert "quota" in copying.hint
