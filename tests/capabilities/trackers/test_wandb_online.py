"""Tests Weights & Biases with a server: the calls of its client, and a server that does not answer."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.runs import free_port
from trainkit.capabilities.trackers import clients
from trainkit.capabilities.trackers.clients import Facts, Sample, WandbRun
from trainkit.config.running import WandbConfig
from trainkit.run.rundir import RunDir


class Client:
    """Replaces the wandb module, with a server that has the steps up to `newest`."""

    def __init__(self, newest: int | None) -> None:
        self.step = 0 if newest is None else newest + 1
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.exit_code: int | None = None
        self.url = "https://wandb.test/p/runs/key"
        self.asked: dict[str, Any] = {}

    def Settings(self, **settings: Any) -> SimpleNamespace:
        return SimpleNamespace(**settings)

    def init(self, **asked: Any) -> Client:
        self.asked = asked
        return self

    def log(self, row: dict[str, Any], step: int) -> None:
        self.rows.append((step, row))

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
    run.close("failed")
    assert client.rows == [(8, {"loss": 2.0, "_timestamp": 1.5})]
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
