"""The fixtures of tests that type commands, and a Slurm that runs nothing."""

from pathlib import Path

import pytest
from steering import desk

from trainkit.backends.slurm import group_chunks
from trainkit.backends.slurm.backend import SbatchBackend
from trainkit.capabilities.bench import run_bench

__all__ = ["desk"]


class Sbatch:
    """Accepts scripts as jobs 77, 78, and so on, and knows no job."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[list[str]] = []
        """The options of each accepted job."""
        monkeypatch.setattr(group_chunks, "show_config", dict)
        monkeypatch.setattr(group_chunks, "submit_script", self.submit)
        monkeypatch.setattr(run_bench, "query_jobs_or_warn", lambda ids, warn: None)
        monkeypatch.setattr(SbatchBackend, "ask_every_s", 0.0)

    def submit(self, script: Path, *, extra_argv: list[str], **more: object) -> str:
        self.taken.append([script.parent.name, *extra_argv])
        return str(76 + len(self.taken))


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sbatch:
    """Work in a folder with a config."""
    (tmp_path / "text.txt").write_text("line\n" * 1000)
    (tmp_path / "small.yaml").write_text(
        "name: small\ndevice: cpu\ndata: {source: text.txt, seq_len: 32}\n"
        "train: {device_batch_size: 2, global_batch_size: 8}\n"
    )
    monkeypatch.chdir(tmp_path)
    return Sbatch(monkeypatch)
