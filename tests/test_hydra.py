"""Tests multiruns of Hydra and a study of Optuna as runs of trainkit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.programs import run_program
from trainkit.run.group import RunGroup
from trainkit.run.history import read_plan
from trainkit.run.rundir import RunDir
from trainkit.run.trial import trial_values

ROOT = Path(__file__).resolve().parents[1]
APP = """
import os
from dataclasses import dataclass

import hydra
from hydra.core.config_store import ConfigStore


@dataclass
class Config:
    x: int = 1
    y: float = 0.5


ConfigStore.instance().store(name="config", node=Config)


@hydra.main(version_base=None, config_name="config")
def main(config):
    print("rank", os.environ["RANK"], "x", config.x, flush=True)
    if config.x == 9:
        raise ValueError("x is nine")
    return config.x * config.y


if __name__ == "__main__":
    main()
"""


def environ(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / ".state")}


def multirun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "app.py").write_text(APP)
    argv = [sys.executable, "app.py", "-m", "hydra/launcher=trainkit", *words]
    return run_program(*argv, cwd=folder, env=environ(folder))


OVERRIDES: dict[str, dict[str, object]] = {
    **{"lr=1e-4": {"lr": "1e-4"}, "n=10": {"n": "10"}, "n=1_000": {"n": 1000}, "x=nan": {"x": "nan"}},
    **{"model=big": {"model": "big"}, "model/head@src=big": {"model/head@src": "big"}},
    **{"+key=1": {"key": "1"}, "++a.b=c": {"a.b": "c"}, "~key": {"key": None}, "~key=1": {"key": None}},
    **{"a.b.c=true": {"a.b.c": True}, "a=null": {"a": None}, "a=": {"a": ""}, "a='b c'": {"a": "b c"}},
    **{"a='1'": {"a": "1"}, "a=[1,2.5]": {"a": [1, 2.5]}, "a={b:1,c:[d]}": {"a.b": 1, "a.c": ["d"]}},
    **{"a=${b}": {"a": "${b}"}, "a='b=c'": {"a": "b=c"}, "a='模型'": {"a": "模型"}, "a=-0.5": {"a": "-0.5"}},
    **{"hydra.job.name=x": {}, "hydra/launcher=trainkit": {}, "+hydra.launcher.overrides.seed=1": {}},
    "password=hunter2": {"password": "***"},
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_override_is_a_value(override: str) -> None:
    pytest.importorskip("hydra")
    from hydra_plugins.trainkit_launcher import HydraJob, _params

    job = HydraJob(0, _params([override]), None, None, None, {})  # type: ignore[arg-type]
    assert trial_values({"job": job}) == OVERRIDES[override]


@pytest.mark.slow(seconds=15)
def test_a_multirun_is_a_group(tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    options = ["hydra.launcher.limit=2", "hydra.launcher.gpus_per_node=2", "hydra.launcher.name=both"]
    done = multirun(tmp_path, "x=1,2", "y=0.5", "hydra.sweep.dir=out", *options)
    assert done.returncode == 0, done.stderr
    group = RunGroup(tmp_path / "runs" / "both")
    assert f"trainkit status {group.path}: 2 runs" in done.stdout
    logs = [run.attempt(1).rank_log(rank).read_text() for run in map(group.run, range(2)) for rank in (0, 1)]
    assert logs == [f"rank {rank} x {x}\n" for x in (1, 2) for rank in (0, 1)]
    overrides = [(tmp_path / "out" / str(n) / ".hydra/overrides.yaml").read_text() for n in range(2)]
    assert overrides == [f"- x={x}\n- y=0.5\n" for x in (1, 2)]
    assert [trial.values for trial in group.trials.values()] == [{"x": str(x), "y": "0.5"} for x in (1, 2)]
    once = "+hydra.launcher.overrides.requeue.max_crashes=0"
    failed = multirun(tmp_path, "x=9", once, "hydra.launcher.name=one")
    assert failed.returncode == 1
    assert "ValueError: x is nine" in failed.stderr
    assert read_plan(RunDir(tmp_path / "runs/one/0")).count("world_size") == 1
    refused = multirun(tmp_path, "x=1,2", "hydra.launcher.time=soon")
    assert "resources.time: must be" in refused.stderr


@pytest.mark.slow(seconds=15)
def test_a_study_that_is_killed_continues_with_its_runs(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    argv = [sys.executable, str(ROOT / "examples/optuna_study.py"), "--trials", "3", "--at-once", "2"]
    study = subprocess.Popen(argv, cwd=tmp_path, env=environ(tmp_path), start_new_session=True)
    deadline_s = time.monotonic() + 120
    while not (tmp_path / "runs" / "trial-1" / "attempts").is_dir():
        assert study.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    os.killpg(study.pid, signal.SIGKILL)
    study.wait()
    done = run_program(*argv, cwd=tmp_path, env=environ(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "best of 3: " in done.stdout
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    trials = optuna.load_study(study_name="examples-lr", storage=storage).trials
    states = [trial.state.name for trial in trials]
    assert states.count("COMPLETE") == 3
    assert set(states) <= {"COMPLETE", "FAIL"}  # one trial may have been killed before its run was recorded
    paths = [trial.user_attrs["run"] for trial in trials if trial.state.name == "COMPLETE"]
    assert len(set(paths)) == 3
