"""Tests that trials are checked before anything is written, and that one script serves all of them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.groups import make_group, planned
from tests.support.programs import run_program
from tests.support.said import said
from trainkit.backends.slurm import group_chunks
from trainkit.cluster.model import Cluster
from trainkit.cluster.target import Target
from trainkit.config import load_config
from trainkit.errors import ConfigError, UsageError
from trainkit.launch import submission
from trainkit.launch.config_request import ConfigRequest
from trainkit.launch.create import create_submission, start_group
from trainkit.launch.plan_run import Gatherer, plan_run
from trainkit.launch.submission import PlannedTrial, Submission, plan_submission
from trainkit.launch.sweep import ArraySpec, LoadedTrial, group_trials, parse_array
from trainkit.plan.workload import TRAINER
from trainkit.run.files import difference, read_json
from trainkit.run.group import RunGroup
from trainkit.scheduler import array_indices
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable

LRS: dict[int, dict[str, Any]] = {index: {"optimizer.lr": 0.1 * (index + 1)} for index in range(3)}


def problems(folder: Path, trials: dict[int, dict[str, Any]]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        planned(folder, trials)
    return [problem.render() for problem in caught.value.problems]


BAD = {
    "each": {0: {"optimizer.lr": 0.1}, 1: {"optimizer.lr": -1}, 2: {"optimizer.lr": "x"}},
    "several": {
        index: {"seed": index, "train.device_batch_size": size} for index, size in enumerate((1, 3, 3, 3))
    },
    "all": {index: {"seed": index, "model.dropout": 2} for index in range(3)},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_names_its_points_once(tmp_path, name):
    said("\n".join(problems(tmp_path, BAD[name])))


def test_problems_are_cut_off(tmp_path):
    found = problems(tmp_path, {index: {"optimizer.lr": -index} for index in range(30)})
    assert len(found) == 11
    assert found[-1] == "and 20 more problems"


@pytest.mark.parametrize(
    "values",
    [
        *({"resources.nodes": 2}, {"resources.mem": "8G"}, {"resources.clusters": ["east", "west"]}),
        *({"launch.modules": ["cuda"]}, {"requeue.grace_s": 60}),
        {"device": "cuda", "resources.gpus_per_node": 1},
    ],
    ids=str,
)
def test_an_array_is_one_script(tmp_path, values):
    with pytest.raises(UsageError) as caught:
        planned(tmp_path, {0: {"seed": 1}, 1: {"seed": 2, **values}})
    said(caught.value.message)


def test_layouts_may_differ_where_the_job_does_not(tmp_path):
    trials = {0: {"parallel.dp_shard": 1}, 1: {"parallel.dp_shard": -1}, 2: {"launch.network": "lo"}}
    assert [trial.plan.layout.dp_shard for trial in planned(tmp_path, trials)] == [1, 1, 1]


def make_group_in(folder: Path) -> RunGroup:
    folder.mkdir()
    return make_group(folder, LRS)


def test_the_script_finds_the_run_of_its_task(tmp_path):
    group = make_group_in(tmp_path / "a b;'$(touch x)")
    lines = group.script_file.read_text().splitlines()
    assert "#SBATCH --array=0-2" in lines
    assert f'#SBATCH --output="{group.logs_dir}/%a.log"' in lines
    assert lines.count('    "$run"') == 1
    (assignment,) = [line for line in lines if line.startswith("run=")]
    bash = f'{assignment}\nprintf %s "$run"'
    assert run_program("bash", "-c", bash, env={"SLURM_ARRAY_TASK_ID": "2"}).stdout == str(group.run(2).path)
    assert run_program("bash", "-c", bash, env={}).returncode != 0
    whole = run_program("bash", "-n", group.script_file)
    assert (whole.returncode, whole.stderr) == (0, "")


def test_percent_signs_and_backslashes_of_the_folder(tmp_path):
    text = make_group_in(tmp_path / "100%a").script_file.read_text()
    assert f"#SBATCH --output={tmp_path}/100%%a/group/logs/%a.log" in text
    with pytest.raises(UsageError, match="contains a backslash, so Slurm"):  # all tasks would have one log
        make_group_in(tmp_path / "a\\b")
    assert not (tmp_path / "a\\b" / "group").exists()


def test_variables_that_differ_are_not_in_the_script(tmp_path):
    trials = {index: {"launch.env": {"SAME": "1", "OWN": str(index)}} for index in range(2)}
    group = make_group(tmp_path, trials)
    text = group.script_file.read_text()
    assert "export SAME=1" in text
    assert "OWN" not in text
    assert [group.trials[index].config for index in range(2)] == [{}, {"launch.env.OWN": "1"}]
    assert group.trials[1].plan == {"env.OWN": "1"}


def test_the_record_is_what_was_asked_and_its_folder_is_taken(tmp_path):
    group = make_group(tmp_path, LRS)
    before, record = group.sweep_file.read_bytes(), read_json(group.sweep_file)
    assert (record["version"], record["name"], record["job_id"]) == (1, "small", "12")
    assert record["keys"] == ["optimizer.lr"]
    assert [trial["values"] for trial in record["points"]] == list(LRS.values())
    assert record["points"][0] == {"index": 0, "values": {"optimizer.lr": 0.1}}
    with pytest.raises(UsageError, match="already contains a group of runs"):
        make_group(tmp_path, LRS)
    assert group.sweep_file.read_bytes() == before


def test_no_secret_reaches_the_record(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh12345")
    with pytest.raises(UsageError, match=r"the value of HF_TOKEN would be written into .*sweep\.json"):
        make_group(tmp_path, {0: {"launch.env": {"X": "1"}}, 1: {"launch.env": {"X": "hf_abcdefgh12345"}}})
    assert not (tmp_path / "group").exists()


def test_the_same_script_whenever_it_is_asked_for(tmp_path):
    made = Submission(planned(tmp_path, LRS), ArraySpec((0, 1, 2), None))
    text, _ = made.preview(tmp_path / "group")
    run = create_submission(made, ["trainkit"], tmp_path / "group").run
    assert made.script(run, None).text == text == run.script_file.read_text()


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        *((SlurmRefused("no"), False), (SlurmUnreachable("away"), False), (OSError("disk"), False)),
        (SlurmUnreachable("lost", may_have_arrived=True), True),
    ],
)
def test_a_group_that_slurm_does_not_take_leaves_no_trace(tmp_path, monkeypatch, error, is_kept):
    group = make_group(tmp_path, LRS, job_id=None)
    monkeypatch.setattr(group_chunks, "submit_script", Mock(side_effect=error))
    monkeypatch.setattr(group_chunks, "show_config", dict)
    with pytest.raises(type(error)):
        start_group(group)
    assert group.path.exists() == is_kept


def test_ten_thousand_points_are_four_files(tmp_path):
    (trial,) = planned(tmp_path, {0: {"seed": 0}})
    many = [PlannedTrial(index, {"seed": index}, trial.config, trial.plan) for index in range(10_000)]
    made = Submission(many, ArraySpec(tuple(range(10_000)), None))
    group = RunGroup(create_submission(made, ["trainkit"], tmp_path / "group").run.path)
    assert len([path for path in group.path.iterdir() if path.name != ".lock"]) == 4
    assert len(json.loads(group.sweep_file.read_text())["points"]) == 10_000


def plan(trials: Iterable[LoadedTrial], array: ArraySpec | None) -> Submission:
    return plan_submission(trials, array, TRAINER, after=(), warn=print)


@pytest.fixture
def request_of_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConfigRequest:
    monkeypatch.chdir(tmp_path)
    text = "extends: quickstart.yaml\nname: many\ndevice: cpu\nlaunch: {snapshot: false}\n"
    Path("run.yaml").write_text(text)
    target = Target("sbatch", "a test", Cluster("unknown"))
    monkeypatch.setattr("trainkit.launch.plan_run.make_target", lambda loaded: target)
    return ConfigRequest("run.yaml", None, (), {})


SEEDS = "optimizer.lr=0.1,0.2,-1", "seed=" + ",".join(map(str, range(5)))


@pytest.mark.parametrize(
    ("sweeps", "array", "num_plans", "num_loads"), [((), "0-99", 1, 1), (SEEDS, None, 2, 7)]
)
def test_points_that_differ_only_in_the_seed_are_planned_once(
    request_of_config, monkeypatch, sweeps, array, num_plans, num_loads
):
    plans, loads = Mock(wraps=plan_run), Mock(wraps=ConfigRequest.load)
    monkeypatch.setattr(submission, "plan_run", plans)
    monkeypatch.setattr(ConfigRequest, "load", lambda *args, **more: loads(*args, **more))
    spec, found = group_trials(request_of_config, TRAINER, sweeps, array)
    loaded = [trial for trial in found if trial.values.get("optimizer.lr") != -1]
    assert loads.call_count == num_loads
    made = plan(loaded, spec)
    trials = made.trials
    assert plans.call_count == num_plans
    assert [trial.values for trial in trials] == [trial.values for trial in loaded]
    for trial in trials[:: len(trials) - 1]:
        flags = {key: (f"--sweep {key}={value}", value) for key, value in trial.values.items()}
        alone = load_config("run.yaml", flags=flags, environ={})
        assert trial.config == alone.config
        assert trial.plan == plan_run(alone, Gatherer().facts(alone))
    group_made = RunGroup(create_submission(made, ["trainkit"], Path("group").absolute()).run.path)
    base, own = group_made.record.config, trials[-1].config.model_dump(mode="json", by_alias=True)
    assert group_made.trials[trials[-1].index].config == difference(base, own)


def test_each_bad_point_is_reported_however_points_are_loaded(request_of_config):
    array, trials = group_trials(request_of_config, TRAINER, ("optimizer.lr=0.1,-1", "seed=1,-2"), None)
    with pytest.raises(ConfigError) as caught:
        plan(trials, array)
    said("\n".join(problem.render() for problem in caught.value.problems))


@pytest.mark.parametrize(
    ("text", "indices", "limit", "directive"),
    [
        ("0-3", (0, 1, 2, 3), None, "0-3"),
        ("0-9%4", tuple(range(10)), 4, "0-9%4"),
        ("5,1,3", (1, 3, 5), None, "1,3,5"),
        ("1-2,4,5-6%1", (1, 2, 4, 5, 6), 1, "1-2,4-6%1"),
        ("0-20:10", (0, 10, 20), None, "0,10,20"),
        ("7", (7,), None, "7"),
        ("%4", (), 4, "%4"),
    ],
)
def test_arrays(text, indices, limit, directive):
    spec = parse_array(text)
    assert (spec.indices, spec.limit, spec.directive) == (indices, limit, directive)


@pytest.mark.parametrize("text", ["", "a-b", "0-9%", "0-9%0", "0-9%x", "1,1", "0-3,2", "9-0", "0-200000"])
def test_no_arrays(text):
    with pytest.raises(UsageError) as caught:
        parse_array(text)
    said(caught.value.message)
    assert caught.value.hint


@given(st.sets(st.integers(0, 300), min_size=1))
def test_slurm_reads_the_same_indices(indices):
    spec = ArraySpec(tuple(sorted(indices)), None)
    assert array_indices(spec.directive) == sorted(indices)
