"""Tests which steps a tracker gets, and when, with trackers that keep them in memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.runs import free_port, make_attempt
from tests.support.said import said
from trainkit.capabilities.media.items import index_file, media_dir
from trainkit.capabilities.trackers import clients, sync, trackers_dir
from trainkit.capabilities.trackers.clients import Facts, Sample, WandbRun, read_facts
from trainkit.capabilities.trackers.sync import RunTracker, Sent, read_position, state_of, sync_run
from trainkit.config.running import MlflowConfig, WandbConfig
from trainkit.locks import LockBusy
from trainkit.run.files import append_jsonl, write_json
from trainkit.run.manifest import MANIFEST_NAME
from trainkit.run.rundir import RunDir


class Memory:
    """A tracker that keeps its steps in memory. While `away` is set, the tracker cannot be reached."""

    place = "here"
    away = ""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.states: list[str] = []
        self.later: list[tuple[int, dict[str, float]]] = []

    def newest_step(self, place: str, step: int) -> int:
        return step if place == self.place else -1

    def send(self, batch: Sequence[Sample]) -> None:
        if self.away:
            raise ConnectionError(self.away)
        self.samples += batch

    def send_later(self, batch: Sequence[Sample], *, is_last: bool, has_steps: bool) -> int:
        sent = batch if is_last else batch[:1] if has_steps else ()
        self.later += [(sample.step, sample.values) for sample in sent]
        return len(sent)

    def close(self, state: str) -> None:
        self.states.append(state)

    @property
    def losses(self) -> list[tuple[int, float]]:
        return [(sample.step, sample.values["loss"]) for sample in self.samples]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()

    def opened(settings: object, facts: Facts, key: str) -> Memory:
        return memory

    monkeypatch.setattr(sync, "open_tracker", opened)
    return memory


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    attempt = make_attempt(tmp_path / "run", ["logging.mlflow=true"])
    write_json(attempt.run.plan_file, json.loads(attempt.plan_file.read_text()))
    attempt.run.checkpoints_dir.mkdir()
    return attempt.run


def train(run: RunDir, attempt: int, steps: range, loss: float = 1.0) -> None:
    for step in steps:
        record = {"step": step, "time": f"2026-01-01T00:00:{step:02d}.000Z", "attempt": attempt}
        append_jsonl(run.metrics_file, {**record, "loss": loss * step, "mfu": None})


def save(run: RunDir, step: int) -> None:
    folder = run.checkpoint_dir(step)
    folder.mkdir()
    (folder / MANIFEST_NAME).write_text("{}")


def tracker(run: RunDir) -> RunTracker:
    return RunTracker(run, "mlflow", MlflowConfig())


def update_and_die(run: RunDir) -> Sent:
    """Update a tracker, drop it as a killed process would, and return the counts of steps."""
    sender = tracker(run)
    sent = sender.update("running")
    sender.release()
    return sent


def test_a_step_is_sent_once_a_checkpoint_covers_it(run: RunDir, memory: Memory) -> None:
    sender = tracker(run)
    train(run, 1, range(1, 4))
    sent = sender.update("running")
    assert (sent.num_sent, sent.num_pending, sent.num_held) == (0, 0, 3)
    assert not (trackers_dir(run) / "mlflow.json").exists()
    save(run, 2)
    sent = sender.update("running")
    assert (sent.num_sent, sent.num_pending, sent.num_held) == (2, 0, 1)
    said(sent.describe())
    assert memory.losses == [(1, 1.0), (2, 2.0)]
    assert sender.update("running").num_sent == 0


def test_steps_that_a_crash_loses_are_sent_as_they_were_computed_again(run: RunDir, memory: Memory) -> None:
    train(run, 1, range(1, 6))
    save(run, 3)
    update_and_die(run)
    train(run, 2, range(4, 8), loss=10.0)
    save(run, 6)
    tracker(run).update("finished", closes=True)
    assert memory.losses == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0), (7, 70.0)]
    assert memory.states == ["finished"]


def test_a_damaged_checkpoint_repeats_no_step(run: RunDir, memory: Memory) -> None:
    train(run, 1, range(1, 5))
    save(run, 4)
    sender = tracker(run)
    sender.update("running")
    train(run, 2, range(2, 7))
    save(run, 6)
    sender.update("running")
    assert [step for step, _ in memory.losses] == [1, 2, 3, 4, 5, 6]


def test_a_server_that_is_away_loses_nothing(run: RunDir, memory: Memory) -> None:
    train(run, 1, range(1, 4))
    save(run, 3)
    memory.away = "connection\nrefused"
    sender = tracker(run)
    sent = sender.update("running")
    assert (sent.num_sent, sent.num_pending) == (0, 3)
    said(sent.describe())
    assert read_position(run, "mlflow").problem == sent.problem
    memory.away = ""
    assert [item.num_sent for item in sync_run(run)] == [3]
    assert read_position(run, "mlflow").problem == ""
    assert sender.update("running").num_sent == 0
    assert memory.losses == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_another_place_gets_every_step_of_the_same_key(run: RunDir, memory: Memory) -> None:
    train(run, 1, range(1, 4))
    save(run, 3)
    update_and_die(run)
    key = read_position(run, "mlflow").key
    memory.place = "elsewhere"
    assert update_and_die(run).num_sent == 3
    assert read_position(run, "mlflow").key == key


def test_one_process_at_a_time(run: RunDir, memory: Memory) -> None:
    train(run, 1, range(1, 4))
    save(run, 3)
    sender = tracker(run)
    sender.update("running")
    with pytest.raises(LockBusy):
        sync_run(run)
    sender.release()
    assert [item.num_sent for item in sync_run(run)] == [0]


def test_only_numbers_are_metrics(run: RunDir, memory: Memory) -> None:
    record = {"step": 1, "time": "2026-01-01T00:00:01.500Z", "attempt": 1, "loss": None, "acc@1": 0.5}
    append_jsonl(run.metrics_file, {**record, "done": True, "tokens": 3})
    tracker(run).update("finished")
    [sample] = memory.samples
    assert sample == Sample(1, 1767225601500, {"attempt": 1.0, "acc_1": 0.5, "tokens": 3.0})


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (None, "running"),
        ({"action": "restart"}, "running"),
        ({"action": "requeue"}, "running"),
        ({"action": "finished"}, "finished"),
        ({"action": "failed"}, "failed"),
        ({"action": "stopped"}, "stopped"),
    ],
)
def test_the_state_is_that_of_the_newest_attempt(run: RunDir, end: object, state: str) -> None:
    if end is not None:
        write_json(run.attempt(1).end_file, end)
    assert state_of(run) == state


def test_facts_name_the_code_without_the_diff(run: RunDir) -> None:
    git = {"sha": "abc", "branch": "main", "dirty": True, "diff": "+password"}
    write_json(run.provenance_file, {"trainkit": "0.1", "argv": ["--set", "x"], "git": git})
    facts = read_facts(run)
    assert facts.code == {"trainkit": "0.1", "commit": "abc", "branch": "main", "dirty": "True"}
    assert facts.layout["world_size"] == 1
    assert facts.config["model.preset"] == "nano"


def test_a_poll_reads_the_steps_once(run: RunDir, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    train(run, 1, range(1, 4))
    save(run, 2)
    sender = tracker(run)
    sender.update("running")
    reads: list[int] = []
    read = sync.read_items
    monkeypatch.setattr(sync, "read_items", lambda run: reads.append(1) or read(run))
    assert sender.update("running").num_held == 1
    assert reads == [1]


def test_offline_is_written_as_a_whole(run: RunDir) -> None:
    assert RunTracker(run, "wandb", WandbConfig(mode="offline")).writes_once
    assert not RunTracker(run, "wandb", WandbConfig()).writes_once


def test_images_histograms_and_texts_are_sent_with_their_steps(run: RunDir, memory: Memory) -> None:
    train(run, 1, range(1, 4))
    png = media_dir(run) / "a.png"
    png.parent.mkdir()
    png.write_bytes(b"\x89PNG\r\n\x1a\n")
    kept = {"attempt": 1, "time": "2026-01-01T00:00:02.000Z"}
    rows: list[dict[str, object]] = [
        {"step": 0, "name": "start", "kind": "text", "text": "x"},
        {"step": 2, "name": "a@1", "kind": "image", "file": "a.png", "caption": "it"},
        {"step": 2, "name": "gone", "kind": "image", "file": "../job.json"},
        {"step": 2, "name": "t", "kind": "text", "text": "<b>"},
        {"step": 5, "name": "h", "kind": "histogram", "low": 0.0, "high": 2.0, "counts": [1, 3]},
        {"step": 5, "name": "nan", "kind": "histogram", "low": None, "high": None, "counts": [0, 0]},
        {"step": 9, "name": "t", "kind": "text", "text": "not saved"},
    ]
    append_jsonl(index_file(run), *({**kept, **row} for row in rows))
    save(run, 7)
    sender = tracker(run)
    assert sender.update("running").num_sent == 5
    assert [sample.step for sample in memory.samples] == [0, 1, 2, 3, 5]
    image, text = memory.samples[2].media
    assert (image.name, image.file, image.text) == ("a_1", png, "it")
    assert (text.name, text.kind, text.text) == ("t", "text", "<b>")
    assert (memory.samples[4].values, len(memory.samples[4].media)) == ({}, 1)
    [histogram] = memory.samples[4].media
    assert (histogram.counts, histogram.ends) == ([1, 3], (0, 2))
    assert sender.update("running").num_sent == 0
    assert sender.update("finished").num_sent == 1


def test_metrics_that_are_measured_later(run: RunDir, memory: Memory) -> None:
    """A later metric is sent once, although its step has been sent."""
    file = run.path / "evaluations" / "metrics.jsonl"
    file.parent.mkdir()
    train(run, 1, range(1, 6))
    save(run, 5)
    sender = tracker(run)
    assert sender.update("running").num_sent == 5
    for step in (2, 4, 4):
        append_jsonl(file, {"step": step, "time": f"2026-01-01T00:00:0{step}.000Z", "eval/acc": step / 2})
    sender.update("running")
    assert memory.later == []
    train(run, 1, range(6, 8))
    save(run, 7)
    sender.update("running")
    assert memory.later == [(2, {"eval/acc": 1.0})]
    sender.update("finished")
    sender.update("finished")
    assert memory.later == [(2, {"eval/acc": 1.0}), (4, {"eval/acc": 2.0}), (4, {"eval/acc": 2.0})]


class Client:
    """Replaces the wandb module, with a server that has the steps up to `newest`."""

    def __init__(self, newest: int | None) -> None:
        self.step = 0 if newest is None else newest + 1
        self.rows: list[tuple[int | None, dict[str, Any]]] = []
        self.axes: dict[str, str] = {}
        self.exit_code: int | None = None
        self.url = "https://wandb.test/p/runs/key"
        self.asked: dict[str, Any] = {}

    def Settings(self, **settings: Any) -> SimpleNamespace:
        return SimpleNamespace(**settings)

    def init(self, **asked: Any) -> Client:
        self.asked = asked
        return self

    def log(self, row: dict[str, Any], step: int | None = None) -> None:
        self.rows.append((step, row))

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def teardown(self) -> None:
        pass

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


def facts(folder: Path) -> Facts:
    return Facts(RunDir(folder), "n", 2, {"seed": 1}, {"commit": "abc"}, {"tp": 2})


@pytest.mark.parametrize(("newest", "known"), [(None, -1), (7, 7)])
def test_the_server_knows_its_newest_step(tmp_path, monkeypatch, newest, known):
    client = Client(newest)
    monkeypatch.setitem(sys.modules, "wandb", client)  # type: ignore[arg-type]
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    run = WandbRun(WandbConfig(entity="team"), facts(tmp_path), "key")
    assert run.newest_step(run.place, 9) == known
    run.send([Sample(8, 1500, {"loss": 2.0})])
    later = [Sample(step, 2500, {"eval/acc": 0.5}) for step in (4, 8)]
    sent = [run.send_later(later, is_last=False, has_steps=has_steps) for has_steps in (False, True)]
    assert [*sent, run.send_later(later[1:], is_last=True, has_steps=False)] == [0, 1, 1]
    run.close("failed")
    assert client.rows == [
        (8, {"loss": 2.0, "_timestamp": 1.5}),
        (None, {"eval/acc": 0.5, "eval/step": 4, "_timestamp": 2.5}),
        (None, {"eval/acc": 0.5, "eval/step": 8, "_timestamp": 2.5}),
    ]
    assert client.axes == {"eval/*": "eval/step"}
    assert client.exit_code == 1
    wanted = {"id": "key", "resume": "allow", "mode": "online", "project": "trainkit", "entity": "team"}
    assert {name: client.asked[name] for name in wanted} == wanted
    assert client.asked["config"] == {
        "seed": 1,
        "trainkit": {"attempt": 2, "code": {"commit": "abc"}, "layout": {"tp": 2}},
    }


@pytest.mark.slow
def test_a_server_that_is_away_can_be_tried_again(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(clients, "INIT_TIMEOUT_S", 2.0)
    for _ in range(2):
        with pytest.raises(wandb.errors.CommError):
            WandbRun(WandbConfig(), facts(tmp_path), "key")
    wandb.teardown()
    assert len(list((tmp_path / "wandb" / "online").iterdir())) <= 1
