"""Tests `trainkit plan`: the table goes to stdout, diagnostics to stderr, exit code 1 if no layout fits."""

import json
import resource
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_program
from tests.support.said import cases, said
from trainkit.capabilities.layouts import command
from trainkit.capabilities.layouts.advice import HEADER
from trainkit.cli.main import main
from trainkit.cluster.machine import Machine

GIB = 2**30


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a;b 'c.yaml").write_text(
        "extends: models/7b.yaml\ntrain: {global_batch_size: 64}\n"
        "parallel: {zero: 3, activation_checkpointing: full}\n"
    )
    return "a;b 'c.yaml"


def test_table(config, capsys):
    assert main(["plan", config, "--gpus", "8", "--gpu-type", "h100", "--limit", "2"]) == 0
    out, err = capsys.readouterr()
    header, *rows = out.splitlines()
    assert header.split() == [name for name in HEADER[1:] if name != "ep"]
    assert [" ".join(row.split()[:17]) for row in rows] == [
        "1 8 1 1 1 2 none 1 x 8 3.1 3.6 6.3 16.6 13.5 42.2 fits",
        "2 4 1 1 1 2 none 1 x 8 6.3 6.8 12.6 16.6 13.5 54.7 fits",
        "* 1 8 1 1 1 3 full 1 x 8 3.1 3.6 6.3 1.6 2.0 16.0",
    ]
    said(rows[-1])
    said(err)


def test_json(config, capsys):
    assert main(["plan", config, "--gpus", "16", "--gpu-type", "a100-40gb", "--limit", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    value = json.loads(out)
    assert err == ""
    assert value["gpu"] == {
        "name": "A100 40GB",
        "memory_bytes": 40 * GIB,
        "usable_bytes": int(40 * GIB * 0.92),
    }
    assert (value["num_gpus"], value["gpus_per_node"], value["num_params"]) == (16, 8, 6_738_415_616)
    assert value["would_fit"] == value["config_problems"] == []
    best, *others = value["choices"]
    assert set(best) == {
        *("layout", "activation_checkpointing", "zero", "offload", "device_batch_size"),
        *("accumulation_steps", "pp_schedule", "pp_microbatches", "fit", "peak_bytes", "worst_moment"),
        *("moments_bytes", "bubble", "recompute", "sent_bytes", "crosses_nodes", "relative_time", "reason"),
        "settings",
    }
    assert (best["fit"], best["relative_time"]) == ("fits", 1.0)
    assert best["peak_bytes"] == sum(best["moments_bytes"][best["worst_moment"]].values())
    assert all(other["relative_time"] > 0.9 for other in others)
    assert value["config"]["layout"] == {
        "dp_replicate": 1,
        "dp_shard": 16,
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "ep": 1,
    }
    assert value["config"]["settings"] == {}


def test_nothing_fits(config, capsys):
    args = ["plan", config, "--gpus", "2", "--gpu-type", "a100-40gb", "--set", "model.preset=13b"]
    assert main(args) == 1
    out, err = capsys.readouterr()
    assert " fits " not in out.partition("\n")[2]
    said(err)
    assert main([*args, "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["headline"] is None
    assert value["would_fit"][0]["num_gpus"] > 2


def test_an_own_layout_that_cannot_be_and_what_to_type(config, capsys):
    assert main(["plan", config, "--gpus", "8", "--gpu-type", "h100", "--set", "parallel.tp=3"]) == 0
    out, err = capsys.readouterr()
    assert not any(line.startswith("*") for line in out.splitlines())
    said(err)
    args = ["--gpus", "2", "--gpu-type", "rtx4090", "--profile", "balanced", "--set", "seed=7"]
    assert main(["plan", config, *args]) == 0
    said(capsys.readouterr().err)


@pytest.mark.parametrize("args", cases(__file__, "test_refused"))
def test_refused(args, config, capsys, monkeypatch):
    nothing = Machine(2, 0, (), "there is no NVIDIA driver on this machine")
    monkeypatch.setattr(command, "detect_machine", lambda: nothing)
    assert main(["plan", config, *args.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    said(err)


def test_the_gpus_of_a_cluster(config, capsys):
    args = ["plan", config, "--cluster", "example", "--nodes", "2", "--json", "--limit", "1"]
    assert main(args) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["gpu"]["name"], value["num_gpus"]) == ("H100 80GB", 16)


@pytest.mark.parametrize(("preset", "gpus"), [("7b", 8), ("70b", 8), ("70b", 512)])
def test_fast_and_without_torch(preset, gpus, config):
    """Processor time is measured, because it does not depend on other load of the machine."""
    code = (
        "import sys; from trainkit.cli.main import main; main(sys.argv[1:])\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    typed = ["plan", config, "--gpus", str(gpus), "--gpu-type", "h100", "--set", f"model.preset={preset}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    argv = [sys.executable, "-c", code, *typed]
    result = run_program(*argv, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.stderr.splitlines()[-1] == "[]"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_the_share_of_effective_time(config, capsys):
    given = ["plan", config, "--gpus", "32", "--gpu-type", "h100", "--set", "train.steps=1000000"]
    rates = ["--failures-per-node-day", "0.5", "--restart-s", "600", "--save-s", "2"]
    assert main([*given, *rates]) == 0
    found, assumed = capsys.readouterr().err.splitlines()[-2:]
    said(found)
    said(assumed)
    assert main([*given, *rates, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)["effective_time"]
    assert value["assumed"] == {"failures_per_node_day": 0.5, "restart_s": 600.0, "save_s": 2.0}
    assert 0.9 < value["share"] <= value["best_share"] < 1
