"""Tests `trainkit replay` and `trainkit data show` on runs that were really trained."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import tasks
from tests.support.flipped import run_flipped
from tests.support.ranks import start_ranks, wait_for_all
from tests.support.replays import DDP, FSDP, OPTIONS, add_job, call, files_of
from tests.support.runs import TIMEOUT_S, environs, log_text, make_attempt, train
from trainkit.capabilities.replay import replay
from trainkit.capabilities.replay.compare import rank_records
from trainkit.cli.main import main
from trainkit.run.events import read_metrics
from trainkit.run.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("replays")]

BAD_LINE = 38


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("layout", [(), DDP, FSDP], ids=["one process", "ddp", "fsdp"])
def test_a_replay_is_equal_to_the_last_digit(
    trained: Callable[..., Path], capsys: pytest.CaptureFixture[str], layout: Sequence[str]
) -> None:
    run = trained(layout)
    before = files_of(run)
    # Where a replay starts does not depend on the layout.
    for steps, start in (*(() if layout else (("2", 0), ("5", 4))), ("3..6", 2)):
        code, found = call(capsys, "replay", str(run), "--step", steps)
        assert (code, found["verdict"], found["is_exact"], found["start_step"]) == (0, "equal", True, start)
        assert [step["step"] for step in found["steps"]] == list(range(start + 1, int(steps[-1]) + 1))
        assert all(step["recorded"] == step["replayed"] for step in found["steps"])
    # The replayed losses of the samples equal the losses of the step, including its dropout.
    losses = [sample["loss"] for sample in found["samples"] if sample["step"] == 6]
    assert len(losses) == 16
    assert sum(losses) / 16 == pytest.approx(read_metrics(RunDir(run))[-1]["loss"], rel=1e-5)
    assert files_of(run) == before, "a replay changes nothing"
    if layout != FSDP:
        return
    code, found = call(capsys, "replay", str(run), "--step", "5", "--layout", "single")
    assert (code, found["verdict"], found["is_exact"]) == (0, "equal", False), "within rounding"
    for step in found["steps"]:
        assert step["recorded"]["loss"] == pytest.approx(step["replayed"]["loss"], abs=1e-5)


@pytest.mark.usefixtures("forked_ranks")
def test_a_replay_begins_with_a_checkpoint_that_is_intact(
    tmp_path: Path,
    trained: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained(), run)
    # If a checkpoint is damaged, the replay uses the one before, but it never computes the run from step 0.
    for step, expected in ((4, 2), (2, None)):
        for file in RunDir(run).checkpoint_dir(step).glob("*.distcp"):
            data = file.read_bytes()
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        if expected is not None:
            assert call(capsys, "replay", str(run), "--step", "5")[1]["start_step"] == expected
    before = files_of(run)
    assert main(["replay", str(run), "--step", "5"]) == 1
    assert files_of(run) == before, "damaged checkpoints are set aside in the replay alone"
    assert "2 set aside" in capsys.readouterr().err
    # The run continues and removes its checkpoints meanwhile, and this folder is on another disk.
    monkeypatch.setattr(replay, "_link_checkpoint", lambda source, target: target.symlink_to(source))
    run_ranks = replay._run_ranks

    def remove_and_run(*args: Any) -> None:
        shutil.rmtree(RunDir(run).checkpoints_dir)
        run_ranks(*args)

    monkeypatch.setattr(replay, "_run_ranks", remove_and_run)
    assert main(["replay", str(run), "--step", "5"]) == 1
    assert "from before the requested steps" in capsys.readouterr().err


def write_corpus(folder: Path) -> Path:
    """Write lines of words, with one line of garbage."""
    chance = random.Random(1)
    words = ["the", "run", "step", "loss", "rank", "of", "a", "node"]
    lines = [" ".join(chance.choices(words, k=120)) for _ in range(160)]
    lines[BAD_LINE - 1] = "".join(chance.choices("\x7fÿ¬§¶þðß¤Ø÷×±µ", k=300))
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return corpus


@pytest.mark.smoke
def test_a_bad_document_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    corpus, run = write_corpus(tmp_path), tmp_path / "run"
    data = [f"data.source={corpus}", "data.val_fraction=0", f"data.cache_dir={tmp_path / 'cache'}"]
    options = ["train.steps=40", "checkpoint.every_steps=10", "optimizer.lr=0.01", "checkpoint.keep_last=9"]
    train(run, [*OPTIONS, *options, *data, "schedule.warmup_steps=2", "train.global_batch_size=8"])
    add_job(run)
    losses = [record["loss"] for record in read_metrics(RunDir(run))]
    step = max(range(12, 40), key=lambda at: losses[at] - losses[at - 1]) + 1
    assert losses[step - 1] > losses[step - 2] + 0.1, "the garbage is a spike"
    code, found = call(capsys, "replay", str(run), "--step", str(step))
    assert (code, found["verdict"], found["is_exact"]) == (0, "equal", True)
    worst, second = found["samples"][0], found["samples"][-1]
    assert worst["loss"] > second["loss"] + 0.5
    (document,) = [item for item in worst["documents"] if "ÿ" in item["text"] or "þ" in item["text"]]
    assert (document["file"], document["unit"], document["position"]) == (str(corpus), "line", BAD_LINE)

    request.getfixturevalue("forked_ranks")
    main(["replay", str(run), "--step", str(step)])
    text = capsys.readouterr().out
    assert text.startswith(
        "equal to the last digit: a spike is due to the data or the optimization, not to the hardware\n"
    )
    first = text.partition("highest loss first:\n")[2]
    assert f"corpus.jsonl line {BAD_LINE}" in "\n".join(first.splitlines()[:4])


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("layout", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_a_flipped_bit_in_a_gradient_names_the_rank_and_the_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: Sequence[str]
) -> None:
    run = tmp_path / "run"
    attempt = make_attempt(run, [*OPTIONS, *layout], 2)
    ranks = [{**env, "SLURMD_NODENAME": f"n{rank}"} for rank, env in enumerate(environs(attempt, 2))]
    codes = wait_for_all(start_ranks(run_flipped, 2, attempt, ranks, 1, 4), TIMEOUT_S)
    assert codes == [0, 0], log_text(attempt)
    add_job(run)
    code, found = call(capsys, "replay", str(run), "--step", "4")
    assert (code, found["verdict"]) == (1, "different")
    third, fourth = found["steps"]
    assert (third["step"], third["is_equal"], fourth["is_equal"]) == (3, True, False)
    assert fourth["recorded"]["loss"] == fourth["replayed"]["loss"], "the forward pass was right"
    assert fourth["recorded"]["grad_norm"] != fourth["replayed"]["grad_norm"]
    assert (found["culprit"]["ranks"], found["culprit"]["hosts"]) == ([1], ["n1"])
    assert "before the reduction" in found["culprit"]["what"]

    # A replay of a later step from the checkpoint before the flip shows the step of the flip.
    assert main(["replay", str(run), "--step", "3..4"]) == 1
    text = capsys.readouterr().out
    assert (
        "different since step 4: the cause is the hardware or a library, not the data\nrank 1 on n1" in text
    )
    if layout == FSDP:
        return
    # After the checkpoint all steps are equal again, because the checkpoint contains the wrong weights.
    assert call(capsys, "replay", str(run), "--step", "6")[1]["verdict"] == "equal"
    # Without the records of the ranks, the replay names no rank.
    for rank in range(2):
        assert rank_records(attempt, rank, 4)
        attempt.rank_record(rank).unlink()
    culprit = call(capsys, "replay", str(run), "--step", "4")[1]["culprit"]
    assert (culprit["ranks"], culprit["what"].endswith("no records of step 4")) == ([], True)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", ["Classify", "ClassifyStream"])
def test_tasks_of_the_users_own(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    run = tmp_path / "run"
    options = [f"task={Path(tasks.__file__)}:{name}", "task_args.dropout=0.2", "optimizer.lr=0.01"]
    train(run, ["train.steps=6", "checkpoint.every_steps=4", *options], 2)
    add_job(run)
    code, found = call(capsys, "replay", str(run), "--step", "6")
    assert (code, found["verdict"], found["is_exact"]) == (0, "equal", True)
    if name == "ClassifyStream":
        assert found["samples"] == []
        assert main(["data", "show", str(run), "--step", "6"]) == 2
        assert "trains on a stream, " in capsys.readouterr().err
        return
    assert [sample["loss"] for sample in found["samples"]] == [None] * 16
    shown = call(capsys, "data", "show", str(run), "--step", "6")[1]["samples"]
    assert [sample["position"] for sample in shown] == list(range(80, 96))
    for sample in shown:
        assert f"'weight': {sample['index'] % 3}}}" in sample["text"]
