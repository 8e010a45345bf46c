"""Tests that commands that read a run from another user execute nothing in it."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.runs import make_attempt
from trainkit.cli.main import main
from trainkit.run.events import log_event
from trainkit.run.files import write_json


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.file), "w")


LOOKS = "status", "logs", "diagnose", "report", "compare", "watch", "status --json", "ckpt ls", "ckpt verify"


def test_looking_at_a_run_executes_nothing_in_it(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    attempt = make_attempt(tmp_path / "received", num_procs=2)
    run, executed = attempt.run, tmp_path / "executed"
    content = pickle.dumps(Planted(executed))
    checkpoint = run.checkpoint_dir(1)
    places = [run.path / "call.pkl", run.path / "result.pkl", run.compiled_file, run.path / "calls/0.pkl"]
    places += [checkpoint / ".metadata", checkpoint / "__0_0.distcp", attempt.flight_dir / "rank_0"]
    places += [attempt.path / "flight/rank_1.pkl", run.path / "submitit/0_0_result.pkl"]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    files = {file.name: {"size": len(content), "sha256": "0" * 64} for file in (places[4], places[5])}
    write_json(checkpoint / "manifest.json", {"step": 1, "files": files})
    log_event(run, 1, "started")
    log_event(run, 1, "hang", rank=0)
    log_event(run, 1, "rank_failed", rank=1, exit_code=1)
    metrics = {"step": 1, "loss": 2.0, "attempt": 1, "time": "2026-01-01T00:00:00Z"}
    run.metrics_file.write_text(json.dumps(metrics) + "\n")
    for look in LOOKS:
        main([*look.split(), str(run.path), *([str(run.path)] if look == "compare" else [])])
        said = capfd.readouterr()
        assert "Traceback" not in said.err, look
        assert "unexpected error" not in said.err, look
        assert not executed.exists(), look
    pickle.loads(content).close()
    assert executed.exists()  # the object is executed by a normal load
