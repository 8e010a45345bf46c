"""Publishes small checkpoints without training, for tests of what happens to a checkpoint later."""

from pathlib import Path

from trainkit.run.events import log_event
from trainkit.run.files import write_json
from trainkit.run.manifest import SEAL, FileSum, file_hash, seal
from trainkit.run.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]


def publish(run: RunDir, step: int, attempt: int = 1) -> None:
    """Publish a checkpoint whose only file contains the step."""
    folder = run.checkpoint_dir(step)
    folder.mkdir(parents=True)
    (folder / "weights").write_text(str(step))
    files = {"weights": vars(FileSum(len(str(step)), file_hash(folder / "weights")))}
    content: dict[str, object] = {"version": 1, "step": step, "files": files}
    write_json(folder / "manifest.json", {**content, SEAL: seal(content)})
    log_event(run, attempt, "checkpoint_commit", step=step, reason="every_steps")


PUBLISHES = f"""
import json, os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.support.published import publish
from trainkit.run.rundir import RunDir
run = RunDir(os.environ["TRAINKIT_JOB_RUN_DIR"])
for step in range(1, 4):
    publish(run, step, int(os.environ["TRAINKIT_JOB_ATTEMPT"]))
    with run.metrics_file.open("a") as stream:
        stream.write(json.dumps({{"step": step, "attempt": 1, "loss": 1 / step}}) + chr(10))
while not (run.path / "finish").exists():
    time.sleep(0.05)
"""
"""A COMMAND that publishes three checkpoints, and then waits for the file ``finish`` in its run folder."""
WRITES = 'echo "{\\"acc\\": $(cat $TRAINKIT_CHECKPOINT/weights)}" > $TRAINKIT_EVAL_OUT'
"""A command that evaluates a checkpoint: its metric `acc` is the step."""
