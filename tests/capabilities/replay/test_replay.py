"""Tests `trainkit replay` and `trainkit data show` on runs that were really trained."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import tasks
from tests.support.flipped import run_flipped
from tests.support.json_outputs import checked
from tests.support.programs import run_program
from tests.support.ranks import ForkedWorker, start_ranks, start_worker, wait_for_all
from tests.support.runs import TIMEOUT_S, environs, log_text, make_attempt, train
from trainkit.capabilities.replay import replay
from trainkit.cli.main import main
from trainkit.run.events import read_metrics
from trainkit.run.files import read_json, write_json
from trainkit.run.rollbacks import Rollback, write_rollbacks
from trainkit.run.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("replays")]

OPTIONS = ["train.steps=6", "checkpoint.every_steps=2", "model.dropout=0.1", "train.device_batch_size=2"]
FSDP = ["parallel.dp_shard=2"]
TP, PP = ["parallel.tp=2", "parallel.dp_shard=1"], ["parallel.pp=2", "parallel.dp_shard=1"]
BAD_LINE = 38


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    """Return the exit code and the JSON of a command."""
    code = main([*argv, "--json"])
    out, err = capsys.readouterr()
    assert out, err
    name = "data-show" if argv[0] == "data" else argv[0]
    return code, checked("error" if out.startswith('{"error"') else name, out.splitlines()[-1])


def files_of(run: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in run.rglob("*")}


def add_job(run: Path) -> None:
    write_json(
        RunDir(run).job_file, {"backend": "local", "name": "t", "cwd": str(run.parent), "attempts": []}
    )


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that returns the trained run of a layout. A test that changes the run copies it."""
    runs: dict[str, Path] = {}

    def run_of(layout: Sequence[str] = ()) -> Path:
        key = " ".join(layout)
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("trained") / "run"
            train(runs[key], [*OPTIONS, *layout], 2 if layout else 1)
            add_job(runs[key])
        return runs[key]

    return run_of


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the ranks of a replay forks of a process that has imported torch."""

    def fork(argv: Sequence[str], *, environ: dict[str, str], output: Any, **_: Any) -> ForkedWorker:
        assert tuple(argv[-3:-1]) == ("-m", "trainkit.trainer")
        return ForkedWorker(start_worker(Path(argv[-1]), Path(output.name), environ))

    monkeypatch.setattr(replay, "start_child", fork)
    monkeypatch.setattr(replay, "kill_group", ForkedWorker.kill)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("layout", [(), FSDP], ids=["one process", "fsdp"])
def test_a_replay_is_equal_to_the_last_digit(
    trained: Callable[..., Path], capsys: pytest.CaptureFixture[str], layout: Sequence[str]
) -> None:
    run = trained(layout)
    before = files_of(run)
    code, found = call(capsys, "replay", str(run), "--step", "3..6")
    assert (code, found["verdict"], found["is_exact"], found["start_step"]) == (0, "equal", True, 2)
    assert [step["step"] for step in found["steps"]] == [3, 4, 5, 6]
    assert all(step["recorded"] == step["replayed"] for step in found["steps"])
    # The replayed losses of the samples equal the losses of the step, including its dropout.
    losses = [sample["loss"] for sample in found["samples"] if sample["step"] == 6]
    assert len(losses) == 16
    assert sum(losses) / 16 == pytest.approx(read_metrics(RunDir(run))[-1]["loss"], rel=1e-5)
    assert files_of(run) == before, "a replay changes nothing"
    if not layout:
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
def test_a_bad_document_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, run = write_corpus(tmp_path), tmp_path / "run"
    data = [f"data.source={corpus}", "data.val_fraction=0", f"data.cache_dir={tmp_path / 'cache'}"]
    options = ["train.steps=40", "checkpoint.every_steps=10", "optimizer.lr=0.01", "checkpoint.keep_last=9"]
    train(run, [*OPTIONS, *options, *data, "schedule.warmup_steps=2", "train.global_batch_size=8"])
    add_job(run)
    losses = [record["loss"] for record in read_metrics(RunDir(run))]
    step = max(range(12, 40), key=lambda at: losses[at] - losses[at - 1]) + 1
    assert losses[step - 1] > losses[step - 2] + 0.1, "the garbage is a spike"
    assert main(["replay", str(run), "--step", str(step)]) == 0
    verdict, values, heading, worst, document, *_ = capsys.readouterr().out.splitlines()
    assert (verdict.partition(":")[0], heading) == ("equal to the last digit", "samples, highest loss first:")
    assert f"loss={losses[step - 1]}" in values
    assert f" step {step} loss " in worst
    assert any(f"{corpus} line {BAD_LINE}" in line for line in (document, *_[:2]))


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("layout", [TP, PP], ids=["tensor parallel", "pipeline"])
def test_layouts_that_split_the_model(
    trained: Callable[..., Path], capsys: pytest.CaptureFixture[str], layout: list[str]
) -> None:
    run = trained([*layout, "model.dropout=0"])
    code, found = call(capsys, "replay", str(run), "--step", "5..6")
    assert (code, found["verdict"], found["is_exact"]) == (0, "equal", True)
    assert all(step["recorded"] == step["replayed"] for step in found["steps"])
    if layout == TP:
        code, found = call(capsys, "replay", str(run), "--step", "5..6", "--layout", "pp=2")
        assert (code, found["verdict"]) == (0, "equal")
        assert all(step["difference"] < 1e-5 for step in found["steps"])
        assert found["rounding"] == ["layout pp=2 instead of tp=2"]


@pytest.mark.usefixtures("forked_ranks")
def test_a_flipped_bit_in_a_gradient_names_the_rank_and_the_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another layout shows the flipped bit, but not the rank that flipped it."""
    run = tmp_path / "run"
    attempt = make_attempt(run, [*OPTIONS, *FSDP, "model.dropout=0"], 2)
    ranks = [{**env, "SLURMD_NODENAME": f"n{rank}"} for rank, env in enumerate(environs(attempt, 2))]
    codes = wait_for_all(start_ranks(run_flipped, 2, attempt, ranks, 1, 4, 30), TIMEOUT_S)
    assert codes == [0, 0], log_text(attempt)
    add_job(run)
    here = ("since step 4: ", "\nrank 1 on n1 ", "its gradient before the reduction", "\n  step 4  recorded ")
    there = ("since step 4 by more than 0.0001 ", "tp=2 instead of dp_shard=2", "one of n0, n1: ")
    for layout, parts in (("same", here), ("tp=2", there)):
        assert main(["replay", str(run), "--step", "3..4", "--layout", layout]) == 1
        text = capsys.readouterr().out
        assert [part for part in (*parts, "grad_norm=not finite;") if part not in text] == []


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", ["Classify", "ClassifyStream"])
def test_tasks_of_the_users_own(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    run = tmp_path / "run"
    options = [f"task={Path(tasks.__file__)}:{name}", "task_args.dropout=0.2", "optimizer.lr=0.01"]
    train(run, ["train.steps=6", "checkpoint.every_steps=4", *options], 2 if name == "ClassifyStream" else 1)
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


def test_a_job_on_this_machine(
    tmp_path: Path, trained: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained()
    before = files_of(run)
    words = ["--step", "4", "--submit", "--run-dir", str(tmp_path / "again"), "--follow"]
    code, found = call(capsys, "replay", str(run), *words)
    assert (code, found["verdict"], found["is_exact"]) == (0, "equal", True)
    job = RunDir(tmp_path / "again")
    assert read_json(job.plan_file)["replay"] == [4, 4]
    assert [path.name for path in job.checkpoints_dir.iterdir()] == ["step-00000002"], "it saves nothing"
    assert call(capsys, "replay", "--collect", str(job.path)) == (0, found)
    assert files_of(run) == before
    assert main(["replay", "--collect", str(run)]) == 2
    assert "is not a replay folder" in capsys.readouterr().err
    job.metrics_file.unlink()
    assert main(["replay", "--collect", str(job.path)]) == 1
    assert "has not computed a" in capsys.readouterr().err


def test_an_interruption_leaves_nothing(tmp_path: Path, trained: Callable[..., Path]) -> None:
    run = trained()
    argv = [sys.executable, "-m", "trainkit", "replay", str(run), "--step", "6"]
    with subprocess.Popen(
        argv, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL
    ) as process:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (logs := list(tmp_path.glob("trainkit-replay-*/attempts/001/logs/rank-0000.log"))):
            assert time.monotonic() < deadline_s
            assert process.poll() is None
            time.sleep(0.02)
        (folder,) = {path.parents[3] for path in logs}
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 143
    assert not folder.exists()
    while [file for file in Path("/proc").glob("[0-9]*/cmdline") if mentions(file, folder)]:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


AT_FORK = """
import os, signal, sys
# Runs first of the hooks, so that the handler runs in one of the next: Python drops an exception there.
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), {number}))
import logging
from trainkit.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interruption_while_a_rank_is_started(
    tmp_path: Path, trained: Callable[..., Path], number: signal.Signals
) -> None:
    run = trained()
    argv = [sys.executable, "-c", AT_FORK.format(number=int(number)), "replay", str(run), "--step", "6"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = run_program(*argv, env=environ, timeout=TIMEOUT_S)
    assert done.returncode == (130 if number == signal.SIGINT else 143), done.stderr
    assert not list(tmp_path.glob("trainkit-replay-*"))


def mentions(file: Path, folder: Path) -> bool:
    """Return whether the command line of a process names a folder."""
    try:
        return str(folder).encode() in file.read_bytes()
    except OSError:
        return False  # the process has just ended


@pytest.mark.usefixtures("forked_ranks")
def test_a_run_that_went_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each step is replayed with the samples of the attempt that computed it."""
    run = tmp_path / "run"
    options = [*OPTIONS, "checkpoint.keep_last=null"]
    train(run, [*options, "train.stop_at_step=5"], expect=75)
    write_rollbacks(RunDir(run), [Rollback(2, 5, 1, ((32, 70), (90, 95)))])
    train(run, [*options, "train.stop_at_step=4"], expect=75)
    add_job(run)
    for step, attempt, positions in (
        (2, 2, range(16, 32)),
        (3, 2, range(70, 86)),
        (4, 2, [*range(86, 90), *range(95, 107)]),
        (5, 1, range(64, 80)),
    ):
        code, found = call(capsys, "data", "show", str(run), "--step", str(step))
        assert (code, found["attempt"]) == (0, attempt if step > 2 else 1)
        assert [sample["position"] for sample in found["samples"]] == list(positions)
    before = files_of(run)
    for steps, start in (("3..4", 2), ("4", 2), ("5", 2)):
        code, found = call(capsys, "replay", str(run), "--step", steps)
        assert (code, found["verdict"], found["is_exact"], found["start_step"]) == (0, "equal", True, start)
    assert files_of(run) == before


@pytest.mark.usefixtures("forked_ranks")
def test_the_items_of_a_task_that_a_run_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = [*OPTIONS, f"task={tasks.__file__}:Classify", "data.num_workers=0"]
    train(run, [*options, "train.stop_at_step=2"], expect=75)
    write_rollbacks(RunDir(run), [Rollback(2, 2, 1, ((40, 60),))])
    train(run, options)
    add_job(run)
    code, found = call(capsys, "data", "show", str(run), "--step", "3")
    assert [sample["position"] for sample in found["samples"]] == [*range(32, 40), *range(60, 68)]
    assert code == 0
    code, found = call(capsys, "replay", str(run), "--step", "3..6")
    assert (code, found["verdict"], found["is_exact"]) == (0, "equal", True)


@pytest.mark.usefixtures("forked_ranks")
def test_a_warmup_of_the_batch_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    stages = "[{steps: 2, global_batch_size: 4}, {steps: 2, global_batch_size: 8}]"
    train(run, [*OPTIONS, f"train.batch_warmup={stages}", "train.log_every=6"])
    add_job(run)
    for step, positions in ((2, range(4, 8)), (4, range(16, 24)), (5, range(24, 40))):
        code, found = call(capsys, "data", "show", str(run), "--step", str(step))
        assert (code, [sample["position"] for sample in found["samples"]]) == (0, list(positions))
    for options in ((), ("--layout", "single")):
        code, found = call(capsys, "replay", str(run), "--step", "3..6", *options)
        assert (code, found["verdict"], found["is_exact"]) == (0, "equal", True)
