"""Tests the mean of checkpoints, and that a run, an export and a text can use the mean or the average."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict_loader

from tests.support.json_outputs import checked
from tests.support.programs import run_program
from tests.support.runs import train
from tests.support.said import said
from trainkit.capabilities.average import worker
from trainkit.capabilities.average.worker import AverageRequest, average
from trainkit.capabilities.export.command import chosen_checkpoint
from trainkit.capabilities.export.worker import ExportRequest, averages_in, export
from trainkit.capabilities.generate.worker import generate
from trainkit.cli.main import main
from trainkit.errors import EXIT_NO_RESTART, UsageError
from trainkit.run.manifest import Checkpoint, find_damage, published
from trainkit.run.rundir import RunDir
from trainkit.trainer.checkpoint.storage import SafeReader

pytestmark = [pytest.mark.slow(seconds=8), pytest.mark.xdist_group("average")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two sharded ranks with checkpoints of steps 1 to 3, which contain averages."""
    folder = tmp_path_factory.mktemp("average") / "run"
    saves = ["checkpoint.every_steps=1", "checkpoint.keep_last=3", "checkpoint.best_metric=null"]
    train(folder, ["train.steps=3", "ema.decay=0.5", "optimizer.lr=0.01", *saves, "data.num_workers=0"], 2)
    return folder


def checkpoints(run: Path) -> list[Checkpoint]:
    return published(RunDir(run).checkpoints_dir)


def request(run: Path, out: Path) -> AverageRequest:
    there = checkpoints(run)
    return AverageRequest([str(item.path) for item in there], [item.step for item in there], str(out))


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in a checkpoint, by name."""
    reader = SafeReader(path)
    items: Any = reader.read_metadata().state_dict_metadata.items()
    found = {name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in items}
    state_dict_loader.load(found, storage_reader=reader, no_dist=True)
    return found


@pytest.mark.parametrize("group_bytes", [1, 100_000, 1 << 28])
def test_the_mean_of_three_checkpoints(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_bytes: int
) -> None:
    monkeypatch.setattr(worker, "GROUP_BYTES", group_bytes)
    out = tmp_path / "out"
    out.mkdir()
    average(request(run, out))
    parts = [tensors_in(item.path) for item in checkpoints(run)]
    found = tensors_in(out)
    assert found.keys() == {name for name in parts[0] if name.startswith("model.")}
    for name, value in found.items():
        mean = sum(part[name].double() for part in parts) / 3
        assert torch.equal(value, mean.float()), name
        assert not torch.equal(value, parts[2][name])
    assert find_damage(Checkpoint(out, 3)) == ""
    assert Checkpoint(out, 3).content()["averaged_steps"] == [1, 2, 3]


def test_a_run_an_export_and_a_text_use_the_mean(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_program(sys.executable, "-m", "trainkit", "ckpt", "average", str(run), "--last", "2", "--json")
    assert done.returncode == 0, done.stderr
    value = checked("ckpt-average", done.stdout)
    out = Path(value["out"])
    assert (value["steps"], out) == ([2, 3], run / "averages" / "step-00000003-last-2")
    mean = tensors_in(out)
    started = train(tmp_path / "next", ["train.steps=1", f"model.init_from={out}", "schedule.warmup_steps=9"])
    assert f"initialized from {out}: " in started.rank_log(0).read_text()
    chosen = chosen_checkpoint(RunDir(run), None, out)
    places = (str(run), str(RunDir(run).attempt(1).config_file), str(chosen.path))
    (tmp_path / "exported").mkdir()
    export(ExportRequest(*places, str(tmp_path / "exported"), "fp32", merge=False))
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert torch.equal(exported["model.embed_tokens.weight"], mean["model.embedding.weight"])
    options = {"prompt": "def ", "max_tokens": 4, "temperature": 0.0, "top_k": None, "top_p": None, "seed": 0}
    options |= {"device": "cpu", "dtype": None, "tokenizer": None, "as_json": True, "ema": False}
    capsys.readouterr()
    generate({**options, "run": places[0], "config_file": places[1], "checkpoint": places[2]})
    assert json.loads(capsys.readouterr().out)["num_tokens"] == 4


def test_an_export_of_the_average(run: Path, tmp_path: Path) -> None:
    newest = checkpoints(run)[-1].path
    places = (str(run), str(RunDir(run).attempt(1).config_file), str(newest))
    found = {}
    for ema in (False, True):
        out = tmp_path / str(ema)
        out.mkdir()
        export(ExportRequest(*places, str(out), "fp32", merge=False, ema=ema))
        found[ema] = load_file(out / "model.safetensors")
    tensors = tensors_in(newest)
    for ema, name in ((False, "model.embedding.weight"), (True, "capability/ema/embedding.weight")):
        assert torch.equal(found[ema]["model.embed_tokens.weight"], tensors[name])
    assert all(not torch.equal(found[False][name], value) for name, value in found[True].items())


def test_refusals(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "other", ["train.steps=1", "model.ffn_dim=96"])
    (tmp_path / "out").mkdir()
    both = [checkpoints(tmp_path / "other")[0], checkpoints(run)[0]]
    with pytest.raises(UsageError) as wrong:
        average(AverageRequest([str(item.path) for item in both], [1, 1], str(tmp_path / "out")))
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(UsageError) as absent:
        averages_in(SafeReader(both[0].path))
    texts = [wrong.value.render(), absent.value.render()]
    capsys.readouterr()
    for words in (
        ["ckpt", "average", str(run), "--last", "9"],
        ["ckpt", "average", str(run), "--last", "2", "--out", str(run)],
        ["ckpt", "export", str(run), "--out", "new", "--checkpoint", str(tmp_path)],
        ["ckpt", "export", str(run), "--out", "new", "--checkpoint", str(tmp_path), "--step", "1"],
    ):
        assert main(words) == 2
        texts.append(capsys.readouterr().err)
    said("\n".join(texts).replace(str(run), "RUN").replace(str(tmp_path), "FOLDER"))


def test_a_checkpoint_without_an_average_starts_no_run_with_one(run: Path, tmp_path: Path) -> None:
    train(tmp_path / "plain", ["train.steps=1"])
    start = [f"model.init_from={tmp_path / 'plain'}", "model.init_weights=ema"]
    attempt = train(tmp_path / "next", ["train.steps=1", *start], expect=EXIT_NO_RESTART)
    assert "model.init_weights is ema, which " in attempt.rank_log(0).read_text()
