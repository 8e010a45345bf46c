"""The fixture of a machine without Slurm, even if this machine has Slurm."""

import pytest


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.cluster.discovery.has_slurm", lambda *_: False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
