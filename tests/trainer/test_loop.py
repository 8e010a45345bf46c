"""A loop of the user's own: what it saves, loads and says when something does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import free_port
from trainkit.manifest import published
from trainkit.rundir import RunDir, read_metrics

SCRIPT = """
import os, sys
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trainkit.loop import attach

total, dies_after, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
run = attach("run")
torch.manual_seed(0)
inputs = torch.randn(256, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2 if kind == "ddp" else 0.0), nn.Linear(16, 1))
model = fully_shard(model) or model if kind == "fsdp" else DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
tracked = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
if kind == "no-model":
    del tracked["model"]
if kind == "unserializable":
    class Odd:
        def state_dict(self): return {"when": object()}
    tracked["odd"] = Odd()
run.track(**tracked)
for step in run.steps(total, save_every=4):
    at = run.sample_indices(step, len(inputs), batch_size=16 // run.world_size)
    loss = (model(inputs[at]) - inputs[at].sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    run.log(loss=loss, lr=scheduler.get_last_lr()[0])
    if step == dies_after:
        os.kill(os.getpid(), 15 if kind == "asked" else 9)
"""


def start(folder: Path, num_ranks: int, *args: object) -> list[int]:
    """The exit codes of the ranks of the script, with the environment that torchrun would set."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    port, procs = free_port(), []
    for rank in range(num_ranks):
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        root = str(Path(__file__).parents[2])
        with (folder / f"log-{rank}").open("ab") as log:
            argv = [sys.executable, "train.py", *map(str, args)]
            environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": root} | {k: str(v) for k, v in env.items()}
            procs.append(subprocess.Popen(argv, cwd=folder, env=environ, stdout=log, stderr=log))
    return [process.wait(timeout=200) for process in procs]


def curve(folder: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r["lr"]) for r in read_metrics(RunDir(folder / "run"))]


@pytest.mark.slow
def test_a_killed_loop_continues_to_the_last_bit(tmp_path: Path) -> None:
    """In DDP with dropout: it computes the steps after the last save again. A stop loses nothing."""
    assert start(tmp_path / "whole", 2, 12, 0, "ddp") == [0, 0]
    assert start(tmp_path / "cut", 2, 12, 6, "ddp") == [-9, -9]
    assert start(tmp_path / "cut", 2, 12, 0, "ddp") == [0, 0]
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    assert start(tmp_path / "asked", 2, 12, 5, "asked") == [75, 75]
    saved = published(RunDir(tmp_path / "asked" / "run").checkpoints_dir)[-1].step
    assert 5 <= saved <= 7
    assert start(tmp_path / "asked", 2, 12, 0, "asked") == [0, 0]
    assert [step for step, *_ in curve(tmp_path / "asked")] == list(range(1, 13))


@pytest.mark.slow
def test_another_number_of_ranks(tmp_path: Path) -> None:
    """Sharded on two ranks, then on one: the checkpoints are the same."""
    assert start(tmp_path / "whole", 1, 12, 0, "fsdp") == [0]
    assert start(tmp_path / "moved", 2, 12, 5, "fsdp") == [-9, -9]
    assert start(tmp_path / "moved", 1, 12, 0, "fsdp") == [0]
    for mine, expected in zip(curve(tmp_path / "moved"), curve(tmp_path / "whole"), strict=True):
        assert mine == pytest.approx(expected, rel=1e-5)


def test_the_example_of_the_docs(tmp_path: Path) -> None:
    """On one process, started by hand; it goes on where it was, which is its end."""
    page = (Path(__file__).parents[2] / "docs" / "own-script.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "train.py").write_text(code)
    for said in ("checkpoint step=200 reason=final", "resumed from step-00000200"):
        done = subprocess.run(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
    losses = [record["loss"] for record in read_metrics(RunDir(tmp_path / "runs" / "attached"))]
    assert len(losses) == 200
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no-model", "the parameters of optimizer are not those of one tracked module"),
        ("unserializable", "odd.when cannot be saved"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, kind: str, message: str) -> None:
    """Known before the first step."""
    assert start(tmp_path, 1, 12, 0, kind) == [1]
    assert message in (tmp_path / "log-0").read_text()
    record = json.loads((tmp_path / "run" / "attempts" / "001" / "errors" / "rank-0000.json").read_text())
    assert message in record["message"]
    assert (record["step"], record["phase"], record["final"]) == (None, "load", True)
