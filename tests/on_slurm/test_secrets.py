"""Tests that secrets reach the ranks through their environment, and appear in no file or output."""

import stat
from hashlib import sha256
from pathlib import Path

from tests.on_slurm.login import BACKENDS, log_of

SECRETS = {"HF_TOKEN": "hf_verysecretvalue123", "WANDB_API_KEY": 'it\'s $ecret "value" é'}
TELLS = """
import hashlib, os, sys
for name in ("HF_TOKEN", "WANDB_API_KEY"):
    print(name, hashlib.sha256(os.environ[name].encode()).hexdigest())
"""


def files_with(folder: Path, value: str) -> list[Path]:
    """Return every file below a folder that contains a value."""
    needle = value.encode()
    return [path for path in folder.rglob("*") if path.is_file() and needle in path.read_bytes()]


def test_secrets_reach_the_ranks_and_no_file(login):
    (login.folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in SECRETS.items()))
    login.script(TELLS)
    runs, printed = [], ""
    for backend in BACKENDS:
        args = ["--backend", backend, "--nodes", "2", "--set", "resources.extra.hold=true"]
        command = ["--", "python", "script.py"]
        shown = login.trainkit("submit", str(login.config), *args, "--dry-run", *command, env=SECRETS)
        assert shown.returncode == 0, shown.stderr
        run = login.submit(*args, *command, env=SECRETS)
        script = login.cluster.batch_script(login.job_id(run)).decode()
        job = login.run(["scontrol", "--details", "show", "job", login.job_id(run)], check=True).stdout
        login.run(["scontrol", "release", login.job_id(run)], check=True)
        printed += shown.stdout + shown.stderr + script + job
        runs.append(run)
    hashes = "".join(f"{name} {sha256(value.encode()).hexdigest()}\n" for name, value in SECRETS.items())
    for run in runs:
        login.finish(run)
        assert [log_of(run, rank) for rank in range(2)] == [hashes, hashes]
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    for value in SECRETS.values():
        assert [file for run in runs for file in files_with(run.path, value)] == []
        assert value not in printed
