"""Tests the record that a rank writes when it fails."""

import json
from pathlib import Path

import pytest

from tests.support.runs import TIMEOUT_S, make_attempt, start_workers
from trainkit.errors import CheckpointError, DivergedError, TrainkitError, UsageError
from trainkit.trainer.__main__ import exit_code_of, record_failure
from trainkit.trainer.progress import Progress, RankInfo

WHO = RankInfo(rank=3, node_rank=1, host="h")
UNWRITTEN = UsageError("the data cache cannot be written")
UNWRITTEN.__cause__ = OSError(28, "full")


def at_step(step):
    progress = Progress()
    if step is not None:
        progress.begin_step(step)
        progress.enter("forward")
    return progress.current


@pytest.mark.parametrize(
    ("error", "step", "code"),
    [
        (ModuleNotFoundError("no module"), None, 78),
        (ImportError("cannot import"), 12, 78),
        (IndentationError("bad"), None, 78),
        (NameError("name 'x' is not defined"), None, 78),
        (NameError("name 'x' is not defined"), 12, 1),
        (RuntimeError("connection closed"), None, 1),
        (DivergedError("nan"), 12, 78),
        (CheckpointError("full"), 12, 1),
        (TrainkitError("other data", exit_code=78), None, 78),
        (UsageError("the val split is too short"), None, 78),
        (UNWRITTEN, None, 1),
        (SystemExit(5), 12, 1),
    ],
)
def test_what_would_happen_again_is_final(error, step, code):
    assert exit_code_of(error, at_step(step)) == code


@pytest.mark.parametrize(
    ("code", "kind", "message", "hint"),
    [
        (
            *("__version__ = '2.10.0'", "UsageError"),
            " has torch 2.10.0, but the trainer requires torch 2.11 or newer",
            "pip install 'torch>=2.11,<2.16'",
        ),
        ("raise ImportError('libcudart: no such file')", "ImportError", "libcudart: no such file", ""),
    ],
)
def test_a_torch_that_is_too_old_or_cannot_be_imported(tmp_path, code, kind, message, hint):
    attempt = make_attempt(tmp_path / "run")
    (tmp_path / "torch.py").write_text(code)
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    [rank] = start_workers(attempt, env={"PYTHONPATH": path})
    assert rank.wait(timeout=TIMEOUT_S) == 78
    record = json.loads(attempt.rank_error(0).read_text())
    assert record["message"].endswith(message)
    assert hint in record["hint"]
    assert (record["type"], record["final"]) == (kind, True)


@pytest.mark.parametrize("step", [None, 37])
def test_record(attempt, step, capsys):
    code = 0
    try:
        raise ValueError("a bug")
    except ValueError as error:
        code = record_failure(attempt, WHO, error, at_step(step))
    assert code == 1
    value = json.loads(attempt.rank_error(3).read_text())
    assert 'raise ValueError("a bug")' in value.pop("traceback")
    assert value.pop("time").endswith("Z")
    code = value.pop("code")
    assert (Path(code["file"]).name, code["text"]) == (Path(__file__).name, 'raise ValueError("a bug")')
    assert value == {
        **vars(WHO),
        "step": step,
        "phase": "start" if step is None else "forward",
        "type": "ValueError",
        "message": "a bug",
        "hint": "",
        "exit_code": 1,
        "final": False,
    }
    assert "ValueError: a bug" in capsys.readouterr().err
