import json

import pytest

from trainkit.config import LoadedConfig
from trainkit.config.schema import RunConfig
from trainkit.control.resume import copy_checkpoint
from trainkit.errors import UsageError
from trainkit.plan.launch import Batch, LaunchPlan, Layout
from trainkit.rundir import RunDir, read_json
from trainkit.submit.create import check_name, create_run, plan_text


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return LoadedConfig(RunConfig.model_validate({"name": "mine"}), {})


def test_new_folders_count_up(loaded, tmp_path):
    names = [create_run(loaded, None, ["trainkit"], "local")[1] for _ in range(3)]
    assert names == ["mine", "mine-2", "mine-3"]
    job = read_json(tmp_path / "runs/mine-2/job.json")
    expected = {"backend": "local", "name": "mine-2", "cwd": str(tmp_path), "code": None, "attempts": []}
    assert job == expected


def test_exact_folder_keeps_the_name_of_the_config(loaded, tmp_path):
    run, name = create_run(loaded, tmp_path / "deep" / "a b;$(x)\n", ["trainkit"], "local")
    assert name == "mine"
    assert run.path.is_dir()


@pytest.mark.parametrize("name", ["last", "local-12", "4711", "4711_3"])
def test_names_that_mean_something_else(name):
    with pytest.raises(UsageError, match="cannot be called"):
        check_name(name)


def test_plan_text_is_the_plan(tmp_path):
    plan = LaunchPlan(
        "local", 1, 1, "cpu", Layout(), Batch(1, 1, 1, 1), 0.1, 1, 60.0, {"lr": "so"}, command=("a", "b")
    )
    assert LaunchPlan.from_dict(json.loads(plan_text(plan))) == plan
    assert plan_text(plan).endswith("}\n")


def test_copy_of_a_checkpoint_is_published_by_a_rename(tmp_path):
    source, target = RunDir(tmp_path / "a"), RunDir(tmp_path / "b")
    for run in (source, target):
        run.checkpoints_dir.mkdir(parents=True)
    (source.checkpoint_dir(5) / "rank-0").mkdir(parents=True)
    (source.checkpoint_dir(5) / "rank-0" / "data").write_text("x")
    assert copy_checkpoint(source.checkpoint_dir(5), target) == target.checkpoint_dir(5)
    assert (target.checkpoint_dir(5) / "rank-0" / "data").read_text() == "x"
    assert [path.name for path in target.checkpoints_dir.iterdir()] == ["step-00000005"]
