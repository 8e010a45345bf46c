import json

import pytest

from trainkit.config.schema import RunConfig
from trainkit.control.resume import copy_checkpoint
from trainkit.errors import UsageError
from trainkit.plan.launch import Batch, LaunchPlan, Layout
from trainkit.run.files import read_json
from trainkit.run.rundir import RunDir
from trainkit.submit.create import create_run
from trainkit.submit.plan_run import check_name

PLAN = LaunchPlan(
    "local", 1, 1, "cpu", Layout(), Batch(1, 1, 1, 1), 0.1, 1, 60.0, {"lr": "so"}, command=("a", "b")
)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return RunConfig.model_validate({"name": "mine"})


def test_new_folders_count_up(config, tmp_path):
    names = [create_run(config, PLAN, ["trainkit"]).name for _ in range(3)]
    assert names == ["mine", "mine-2", "mine-3"]
    job = read_json(tmp_path / "runs/mine-2/job.json")
    code = job.pop("code")
    assert (code["source"], code["code"]) == (str(tmp_path), str(tmp_path / "runs/mine-2/code"))
    assert job == {"backend": "local", "name": "mine-2", "cwd": str(tmp_path), "attempts": []}


def test_exact_folder_keeps_the_name_of_the_config(config, tmp_path):
    created = create_run(config, PLAN, ["trainkit"], tmp_path / "deep" / "a b;$(x)\n")
    assert created.name == "mine"
    assert created.run.path.is_dir()


@pytest.mark.parametrize("name", ["last", "local-12", "4711", "4711_3"])
def test_names_that_mean_something_else(name):
    with pytest.raises(UsageError, match="cannot be called"):
        check_name(name)


def test_plan_text_is_the_plan():
    assert LaunchPlan.from_dict(json.loads(PLAN.to_text())) == PLAN
    assert PLAN.to_text().endswith("}\n")


def test_copy_of_a_checkpoint_is_published_by_a_rename(tmp_path):
    source, target = RunDir(tmp_path / "a"), RunDir(tmp_path / "b")
    for run in (source, target):
        run.checkpoints_dir.mkdir(parents=True)
    (source.checkpoint_dir(5) / "rank-0").mkdir(parents=True)
    (source.checkpoint_dir(5) / "rank-0" / "data").write_text("x")
    assert copy_checkpoint(source.checkpoint_dir(5), target) == target.checkpoint_dir(5)
    assert (target.checkpoint_dir(5) / "rank-0" / "data").read_text() == "x"
    assert [path.name for path in target.checkpoints_dir.iterdir()] == ["step-00000005"]
