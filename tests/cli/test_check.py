"""Tests `trainkit check`: results go to stdout, diagnostics to stderr, and exit code 2 shows all problems."""

import errno
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.json_outputs import checked
from tests.support.said import said
from tests.support.webhooks import SECRET, webhook
from trainkit import locks
from trainkit.capabilities.simulation import Simulation
from trainkit.capabilities.simulation.simulated_job import simulation_lines
from trainkit.cli.main import main
from trainkit.config import yamlfile


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a;b 'c.yaml").write_text("extends: quickstart.yaml\ndevice: cpu\nresources: {nodes: 2}\n")
    return "a;b 'c.yaml"


def test_derived_values_with_their_reasons(config, prints):
    out, err = prints(["check", config])
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    said(lines["device"])
    said(lines["batch"])
    assert lines["backend"].startswith("local: ")
    names = "backend device workers_per_node layout batch lr threads_per_worker"
    assert set(lines) == {*names.split()}
    assert err == "a;b 'c.yaml: no problems\n"


@pytest.mark.parametrize("command", ["check", "submit"])
def test_a_file_system_without_locks_is_refused(config, command, prints, monkeypatch):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    out, err = prints([command, config], code=2)
    assert out == ""
    said(err[err.index("error: ") :])
    assert [path.name for path in Path.cwd().iterdir()] == [config]


def test_show_origin(config, capsys):
    assert main(["check", config, "--show-origin", "--nodes", "4", "--set", "seed=7"]) == 0
    rows = {line.split()[0]: line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines() if line}
    assert rows["device"] == ["device", '"cpu"', "a;b 'c.yaml:2"]
    assert rows["resources.nodes"] == ["resources.nodes", "4", "--nodes 4"]
    assert rows["seed"] == ["seed", "7", "--set seed=7"]
    assert rows["requeue.max"] == ["requeue.max", "100", "default"]
    assert rows["model.preset"][2].endswith("models/nano.yaml:3")


def test_json(config, prints):
    out, err = prints(["check", config, "--profile", "smoke", "--json"])
    value = json.loads(out)
    assert (value["plan"]["world_size"], value["config"]["train"]["steps"]) == (2, 20)
    assert value["config"]["checkpoint"]["async"] is True
    assert value["origins"]["device"] == "a;b 'c.yaml:2"
    assert err == ""


def test_every_problem_as_json(config, capsys):
    assert main(["check", config, "--json", "--nodes", "3", "--set", "train.global_batch_size=32"]) == 2
    out, err = capsys.readouterr()
    value = json.loads(out)
    assert value["exit_code"] == 2
    said(value["error"])
    [problem] = value["problems"]
    assert value["error"].endswith(f": train.global_batch_size: {problem['message']}")
    assert value["hint"] == problem["hint"]
    assert err == ""


def test_places_of_problems_as_json(config, tmp_path, prints):
    (tmp_path / "x.yaml").write_text("train:\n  stps: 3\n")
    value = json.loads(prints(["check", "x.yaml", "--json", "--set", "resources.time=x:00"], code=2).out)
    assert value["error"].startswith("2 problems\n\n")
    said(value["error"])
    assert value["hint"] == "\n".join(problem["hint"] for problem in value["problems"])
    assert [(it["key"], it["origin"], it["line"]) for it in value["problems"]] == [
        ("train.stps", "x.yaml", 2),
        ("resources.time", "--set resources.time=x:00", None),
    ]
    assert all(f"{it['key']}: {it['message']}" in value["error"] for it in value["problems"])


def test_a_test_notification(config, monkeypatch, prints):
    args = ["check", config, "--test-notification"]
    said(prints(args, code=2).err)
    said(prints([*args, "--set", "notify.webhook=null"], code=2).err)
    with webhook() as found:
        monkeypatch.setenv("TRAINKIT_WEBHOOK_URL", found.url)
        out, err = prints(args)
        assert found.events == ["test"]
        said("\n".join(line for line in out.splitlines() if line.startswith("notify: ")))
        said(err)
        found.status = 404
        out, err = prints(args, code=1)
        said(err)
        assert SECRET not in out + err
    monkeypatch.setenv("TRAINKIT_WEBHOOK_URL", f"ftp://host/{SECRET}")
    said(prints(args, code=2).err)


def test_what_cannot_be_reported_is_said(config, capsys):
    given = ["notify.webhook=MY_HOOK", "notify.mail=me@x.org", "requeue.slow_hosts=restart"]
    assert main(["check", config, *(word for text in given for word in ("--set", text))]) == 0
    said("\n".join(line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")))


def test_a_cluster_far_away(config, prints):
    args = ["check", config, "--cluster", "example", "--no-estimate", "--set", "device=auto"]
    value = json.loads(prints([*args, "--set", "train.device_batch_size=2", "--json"]).out)
    assert (value["plan"]["device"], value["plan"]["world_size"]) == ("cuda", 16)
    assert value["plan"]["slurm"]["sbatch"]["account"] == "physics"
    assert value["config"]["launch"]["network"] == "ib"
    assert value["origins"]["launch.network"].endswith("configs/clusters/example.yaml:21")
    assert value["wait"] is None


def test_all_problems_in_one_pass(config, prints):
    args = ["--cluster", "example", "--partition", "debgu", "--time", "9-0", "--set", "data.source=none.txt"]
    err = prints(["check", config, *args], code=2).err
    assert _keys(err) == ["resources.partition", "resources.time", "data.source"]
    said(err)
    later = err.partition("\n\n")[2]
    for command in ("check", "submit", "drill"):
        out, err = prints([command, config, *args, "--set", "train.stps=1", "--set", "seed=-1"], code=2)
        assert _keys(err) == ["train.stps", "seed", "resources.partition", "resources.time", "data.source"]
        assert err.endswith(later)
        assert out == ""
    assert not Path("runs").exists()


def _keys(err: str) -> list[str]:
    """Return the keys of the problems in an error message, in order."""
    found = [re.search(r"(?<=: )[a-z_]+(\.[a-z_]+)?(?=: )", line) for line in err.splitlines()]
    return [match[0] for match in found if match is not None]


INVALID = (
    *("train.stps=1", "resources.partiton=gpu", "resorces={nodes: 2}", "parallel.dp_shrd=4"),
    # The layout needs more than one node, which is the default.
    *("resources.nodes=many", "model.preset=8bb", "launch.cluster=[]"),
)


@pytest.mark.parametrize("override", INVALID)
def test_an_invalid_value_causes_no_further_problem(override, config, capsys):
    """The run is valid on two nodes of the example cluster with eight GPUs each, and on nothing else."""
    values = ("device=auto", "parallel.dp_replicate=2", "parallel.dp_shard=8", "resources.partition=gpu")
    options = [f"--set={value}" for value in values if value.partition("=")[0] not in override]
    command = ["check", config, *([] if "cluster" in override else ["--cluster", "example"]), *options]
    assert main([*command, "--no-estimate", f"--set={override}"]) == 2
    assert _keys(capsys.readouterr().err) == [override.partition("=")[0]]


def test_what_is_reported_next_to_a_misspelt_key(config, capsys):
    assert main(["check", config, "--cluster", "exmple", "--set", "train.stps=1"]) == 2
    assert _keys(capsys.readouterr().err) == ["train.stps", "launch.cluster"]
    typed = ("resources.nodes=1", "train.stps=1", "resources.partition=debgu", "data.source=none.txt")
    assert main(["run", config, *(f"--set={value}" for value in typed)]) == 2
    assert _keys(capsys.readouterr().err) == ["train.stps", "data.source"]
    assert not Path("runs").exists()


def test_a_profile_that_is_wrong(config, tmp_path, prints):
    (tmp_path / "clusters").mkdir()
    for key in ("partition: {}\n", ""):
        (tmp_path / "clusters" / "mine.yaml").write_text(f"name: mine\n{key}defaults: {{sed: 3}}\n")
        said(prints(["check", config, "--cluster", "mine"], code=2).err)


UNKNOWN = [
    "--cluster",
    "example",
    "--partition",
    "old",
    "--nodes",
    "2",
    "--set",
    "resources.reservation=maintenance",
]
"""Defines four GPUs of unknown type."""


def test_gpus_of_unknown_memory_are_said(config, prints):
    out, err = prints(["check", "models/70b", *UNKNOWN, "--no-estimate"])
    assert "memory" not in out
    said(err)
    [warning] = [line for line in err.splitlines(keepends=True) if line.startswith("warning: ")]
    value = json.loads(prints(["check", "models/70b", *UNKNOWN, "--no-estimate", "--json"]).out)
    assert [f"warning: {text}\n" for text in value["plan"]["warnings"]] == [warning]
    for more in ([], ["--sweep", "seed=1,2"]):
        assert prints(["submit", "models/70b", *UNKNOWN, "--dry-run", *more]).err.count(warning) == 1
    out, err = prints(["plan", "models/70b", *UNKNOWN], code=2)
    said(err)
    assert "warning" not in prints(["check", config]).err


def test_schema(prints):
    out, err = prints(["schema"])
    schema = json.loads(out)
    assert err == ""
    assert list(schema["properties"])[:3] == ["extends", "config_version", "name"]
    assert schema["additionalProperties"] is False
    assert "async" in schema["$defs"]["CheckpointConfig"]["properties"]


SHARDS = ("--set", "train.device_batch_size=1", "--set", "train.global_batch_size=64")


@pytest.mark.slow
def test_one_of_64_ranks_is_simulated(prints):
    argv = ["check", "quickstart", "--simulate-world", "64", "--rank", "63", *SHARDS, "--json"]
    value = checked("check", prints(argv).out)
    assert value["plan"]["layout"]["dp_shard"] == value["plan"]["world_size"] == 64
    assert value["plan"]["device"] == "cuda"
    assert value["simulation"]["rank"] == 63
    assert value["simulation"]["collectives"] == {"all_gather": 1, "all_reduce": 1, "reduce_scatter": 1}
    rank, memory, collectives = simulation_lines(Simulation(**value["simulation"]))
    assert rank.startswith("rank 63 of 64: ")
    assert re.match(r"peak memory [\d.]+ MiB \(param [\d.]+ KiB, ", memory)
    assert collectives.endswith(": 1 all_gather, 1 all_reduce, 1 reduce_scatter")


def test_what_cannot_be_simulated(prints):
    large = " ".join(("--simulate-world 64 --set parallel.tp=8", *SHARDS))
    small = ("--simulate-world 12", "--simulate-world 2 --rank 2", "--simulate-world 2 --no-estimate")
    for options in (*small, "--rank 1", large):
        said(prints(["check", "quickstart", *options.split()], code=2).err)


@pytest.mark.parametrize("command", [["check"], ["submit", "--dry-run", "--sweep", "seed=1,2"]])
def test_a_config_from_standard_input(command, monkeypatch, capsys):
    for text, code in ((b"extends: quickstart\nname: mine\n", 0), (b"\ntrain: {steps: x}\n", 2)):
        yamlfile._standard_input.cache_clear()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert main([command[0], "-", *command[1:]]) == code
    said(capsys.readouterr().err)


@pytest.mark.parametrize("command", ["check", "submit", "run"])
def test_a_python_without_torch(tmp_path, capsys, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)  # torch cannot be imported
    assert main([command, "quickstart", "--set", "device=cpu"]) == 2
    install = f"`{shlex.quote(sys.executable)} -m pip install 'torch>=2.11,<2.16'` installs it"
    environment = "an environment with a supported torch"
    hint = f"{install}, or set launch.venv, conda, modules or container to {environment}"
    error = f"error: {sys.executable} lacks torch, which the trainer requires\n\nhint: {hint}\n"
    assert error in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
