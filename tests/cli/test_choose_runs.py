"""Tests `trainkit status --where … --tag … --sort …` on made-up run folders."""

import json
import re
from pathlib import Path

import pytest

from tests.support.said import said
from tests.support.sweeps import made_up_sweep
from trainkit.backends import jobs
from trainkit.cli.choose_runs import _configs
from trainkit.config import load_config
from trainkit.function import ARGV
from trainkit.observe.current import look_at
from trainkit.run.files import write_json
from trainkit.run.rundir import RunDir


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Create three runs in ./runs, and a sweep over the learning rate."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "query_jobs_or_warn", lambda ids, warn: None)
    (tmp_path / "runs").mkdir()
    made_up_sweep(tmp_path / "runs" / "sweep", {"optimizer.lr": [1e-4, 3e-4]})
    made_up_sweep(tmp_path / "made", {"seed": [0, 1, 2]})
    for index, (lr, tags) in enumerate([(0.001, "[ablation]"), (0.01, "[ablation, wide]"), (0.0001, "[]")]):
        run = RunDir(tmp_path / "made" / str(index))
        config = run.config_file.read_text().replace("tags: []", f"tags: {tags}")
        run.config_file.write_text(config.replace("  lr: 0.0003", f"  lr: {lr}"))
        run.path.rename(tmp_path / "runs" / f"run-{index}")


def listed(prints, *args: str) -> list[str]:
    return [Path(run["run_dir"]).name for run in json.loads(prints(["status", *args, "--json"]).out)]


def test_by_tag(prints):
    assert sorted(listed(prints, "--tag", "ablation")) == ["run-0", "run-1"]
    assert listed(prints, "--tag", "ablation", "--tag", "wide") == ["run-1"]
    assert listed(prints, "--tag", "unknown") == []


@pytest.mark.parametrize("value", [5, ["ablation"], "ablation"])
def test_a_parameter_called_tags_is_no_tag(value, tmp_path, prints):
    group = made_up_sweep(tmp_path / "runs" / "of-function", {"tags": [value], "name": ["other"]})
    sweep_file = group.path / "sweep.json"
    record, plan = json.loads(sweep_file.read_text()), {"command": ["python", *ARGV[1:]]}
    sweep_file.write_text(json.dumps({**record, "plan": {**record["plan"], **plan}}))
    write_json(group.run(0).plan_file, plan)
    assert sorted(listed(prints, "--tag", "ablation")) == ["run-0", "run-1"]
    assert listed(prints, "--where", "name=other") == []
    assert "of-function" in listed(prints, "--where", "name=mine")
    own = _configs(look_at(group.run(0), print)[1])[0]
    assert (own["tags"], own["name"]) == ([], "mine")


def test_by_value_also_of_a_point(prints):
    assert listed(prints, "--where", "optimizer.lr=1e-3") == ["run-0"]
    assert sorted(listed(prints, "--where", "optimizer.lr=1e-4")) == ["run-2", "sweep"]
    assert listed(prints, "--where", "optimizer.lr=1e-4", "--where", "seed=7") == []


def test_by_an_entry_of_a_mapping(tmp_path, prints):
    for index, value in enumerate("ba"):
        file = RunDir(tmp_path / "runs" / f"run-{index}").config_file
        file.write_text(file.read_text().replace("  env: {}", f"  env: {{X: {value}}}"))
    made_up_sweep(tmp_path / "runs" / "of-env", {"launch.env.X": ["b", "c"]})
    assert sorted(listed(prints, "--where", "launch.env.X=b")) == ["of-env", "run-0"]
    assert listed(prints, "--sort", "launch.env.X")[:2] == ["run-1", "run-0"]


def test_by_a_key_of_a_command(tmp_path, prints):
    made_up_sweep(tmp_path / "runs" / "of-command", {"lr": ["1e-3", "5e-3"]})
    assert listed(prints, "--where", "lr=0.001") == ["of-command"]
    assert listed(prints, "--where", "lr=1e-3", "--where", "seed=0") == ["of-command"]
    assert listed(prints, "--where", "lr=1e-2") == []
    assert len(listed(prints, "--sort", "lr")) == 5
    value = json.loads(prints(["compare", "of-command", "--json"]).out)
    assert value["differ"] == ["lr"]
    assert [run["values"]["lr"] for run in value["runs"]] == [0.001, 0.005]
    said(prints(["status", "--where", "beta=1"], code=2).err)


def test_by_a_text_of_a_command_as_typed_or_as_yaml_reads_it(tmp_path, prints):
    swept = {"flag": ["True", "False"], "id": ["007", "008"], "mode": ["[x", "[y"]}
    for key, values in swept.items():
        made_up_sweep(tmp_path / "runs" / f"of-{key}", {key: values})
    for where in ("flag=True", "flag=true", "id=007", "id=7", "id=008"):
        assert listed(prints, "--where", where) == [f"of-{where.partition('=')[0]}"]
    assert listed(prints, "--where", "mode=x") == []


def test_by_an_item_of_a_list(prints):
    assert len(listed(prints, "--where", "optimizer.betas.0=0.9")) == 4
    assert listed(prints, "--where", "tags.1=wide") == ["run-1"]


def test_sorted_by_a_key_or_figure(prints):
    assert listed(prints, "--sort", "optimizer.lr") == ["run-2", "run-0", "run-1", "sweep"]
    by_loss = listed(prints, "--sort", "loss")
    assert by_loss.index("run-1") < by_loss.index("run-0"), "its loss is lower, as that of the middle point"
    lines = prints(["status", "--sort", "optimizer.lr", "--tag", "ablation"]).out.splitlines()
    heading, first, second = lines
    assert heading.split()[-2:] == ["TAGS", "LR"]
    assert (first.split()[-1], second.split()[-1]) == ("0.001", "0.01")


def test_what_was_typed_wrong(prints):
    wrong = ("optimizer.lr", "optimzer.lr=1", "optimizer.lr=[1")
    for options in (*(f"--where {one}" for one in wrong), "--sort los", "run-0 --tag ablation"):
        said(re.sub(r"(?<=valid YAML: ).*", "…", prints(["status", *options.split()], code=2).err))


def test_a_note_and_tags_are_options_of_what_loads_a_config(tmp_path, prints):
    args = ["quickstart", "--note", "with 2 heads", "--tag", "a", "--tag", "b"]
    out = prints(["check", *args, "--show-origin"]).out
    assert "with 2 heads" in out
    assert "--tag a --tag b" in out
    loaded = load_config("quickstart", flags={"tags": ("--tag a", ["a"])})
    assert loaded.config.tags == ("a",)
