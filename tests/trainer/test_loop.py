"""Tests a user's loop: what it saves and loads, and its errors."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support import said as table
from tests.support.programs import run_program
from tests.support.ranks import ForkedWorker, start_script
from tests.support.runs import free_port, wait_for
from trainkit.cli.main import main
from trainkit.run.end import Best, read_end
from trainkit.run.events import diverged_since, read_metrics
from trainkit.run.manifest import published
from trainkit.run.rundir import RunDir

SCRIPT = """
import os, sys, time
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trainkit.loop import attach

total, dies_after, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
run = attach("run")
torch.manual_seed(0)
inputs = torch.randn(256, 8)
dropout = 0.2 if kind in ("ddp", "asked") else 0.0
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.Linear(16, 1))
model = fully_shard(model) or model if kind == "fsdp" else DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
if kind == "grows":
    class Grows:
        seen = {}
        def state_dict(self): return {"seen": dict(self.seen), "at": [torch.ones(1) * len(self.seen)]}
        def load_state_dict(self, state): self.seen, self.at = state["seen"], state["at"]
    grows = Grows()
    model.unused = nn.Parameter(torch.zeros(3))
tracked = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
if kind == "no-model":
    del tracked["model"]
if kind == "unserializable":
    class Odd:
        def state_dict(self): return {"when": object()}
    tracked["odd"] = Odd()
if kind == "grows":
    tracked["grows"] = grows
run.track(**tracked)
for step in run.steps(total, save_every=4, log_every=1):
    at = run.sample_indices(step, len(inputs), batch_size=16 // run.world_size)
    loss = (model(inputs[at]) - inputs[at].sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if kind == "grows":
        grows.seen[step] = float(loss)
    if kind != "main-logs" or run.is_main:
        run.log(loss=loss, lr=scheduler.get_last_lr()[0])
    if kind == "raises" and step == 3 and run.rank == run.world_size - 1:
        {}["column"]
    if step == dies_after:
        time.sleep(1)  # for the last save, which is written in the background
        os.kill(os.getpid(), 15 if kind == "asked" else 9)
if kind == "grows":
    print("seen", sorted(grows.seen), flush=True)
import torch.distributed as dist
dist.barrier()  # the group is the program's until it exits
dist.destroy_process_group()
"""


def start(folder: Path, num_ranks: int, *args: object, script: str = SCRIPT) -> list[int]:
    """Return the exit codes of the script's ranks, with the environment that torchrun would set."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    common = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo", "PATH": "/usr/bin:/bin"}
    ranks = []
    for rank in range(num_ranks):
        environ = {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        argv = ["train.py", *map(str, args)]
        ranks.append(ForkedWorker(start_script(folder, argv, folder / f"log-{rank}", environ)))
    return wait_for(ranks)


def curve(folder: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r["lr"]) for r in read_metrics(RunDir(folder / "run"))]


@pytest.mark.slow
def test_a_killed_loop_continues_to_the_last_bit(tmp_path):
    """The steps after the last save are computed again with DDP and dropout, and a stop loses no step."""
    assert start(tmp_path / "whole", 2, 12, 0, "ddp") == [0, 0]
    assert start(tmp_path / "cut", 2, 12, 6, "ddp") == [-9, -9]
    assert start(tmp_path / "cut", 2, 12, 0, "ddp") == [0, 0]
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    assert start(tmp_path / "asked", 2, 12, 5, "asked") == [75, 75]
    saved = published(RunDir(tmp_path / "asked" / "run").checkpoints_dir)[-1].step
    assert 5 <= saved <= 7
    assert start(tmp_path / "asked", 2, 12, 0, "asked") == [0, 0]
    assert curve(tmp_path / "asked") == curve(tmp_path / "whole")


@pytest.mark.slow
def test_another_number_of_ranks(tmp_path):
    """The loop is sharded on two ranks, then runs on one, with the same checkpoints."""
    assert start(tmp_path / "whole", 1, 12, 0, "fsdp") == [0]
    assert start(tmp_path / "moved", 2, 12, 5, "fsdp") == [-9, -9]
    assert start(tmp_path / "moved", 1, 12, 0, "fsdp") == [0]
    for mine, expected in zip(curve(tmp_path / "moved"), curve(tmp_path / "whole"), strict=True):
        assert mine == pytest.approx(expected, rel=1e-5)


def test_the_example_of_the_docs(tmp_path, capsys):
    """One process, started by hand, ends, resumes and fails, and commands accept it each time."""
    page = (Path(__file__).parents[2] / "docs" / "own-script.md").read_text()
    blocks = (block.partition("```")[0] for block in page.split("```python\n"))
    code = next(block for block in blocks if "from trainkit.loop import attach" in block)
    (tmp_path / "train.py").write_text(code)
    for number, said in enumerate(("checkpoint step=200 reason=final", "resumed from step-00000200")):
        if number == 1:
            (tmp_path / "train.py").write_text(code + "\nraise KeyError('after the last step')\n")
        environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
        done = run_program(sys.executable, "train.py", cwd=tmp_path, env=environ)
        assert done.returncode == number, done.stderr
        assert said in done.stdout
        folder = str(tmp_path / "runs" / "attached")
        assert main(["ckpt", "ls", folder]) == 0
        assert "step-00000200  published" in capsys.readouterr().out
        for name in ("status", "watch", "report"):
            assert main([name, folder, "--json"]) == 0
            shown = json.loads(capsys.readouterr().out)
            shown = shown["status"] if name == "report" else shown
            state = "failed" if number else "finished"
            assert (shown["state"], shown["step"], shown["attempt"]) == (state, 200, number + 1)
    assert main(["diagnose", folder, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["code"]["file"]) == ("exception", "train.py")
    table.said(found["advice"][-1])
    for command in ("resume", "requeue"):
        assert main([command, folder]) == 2
        table.said(capsys.readouterr().err)
    losses = [record["loss"] for record in read_metrics(RunDir(tmp_path / "runs" / "attached"))]
    assert len(losses) == 21
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_states_that_grow_and_parameters_without_gradient(tmp_path):
    """A mapping with integer keys is unchanged, and an unused parameter has no optimizer state."""
    assert start(tmp_path, 1, 6, 5, "grows") == [-9]
    assert start(tmp_path, 1, 6, 0, "grows") == [0]
    log = (tmp_path / "log-0").read_text()
    assert "resumed from step-00000004" in log
    assert "seen [1, 2, 3, 4, 5, 6]" in log


def test_an_exception_is_shown_and_recorded_with_its_line(tmp_path):
    """The same is true at the end of the run, which rank 0 records in spite of its exception."""
    assert start(tmp_path, 2, 12, 0, "raises") == [1, 1]
    line = SCRIPT.partition('{}["column"]')[0].count("\n") + 1
    attempt = RunDir(tmp_path / "run").attempt(1)
    record = json.loads(attempt.rank_error(1).read_text())
    assert (record["type"], record["step"]) == ("KeyError", 3)
    for text in (record["traceback"], (tmp_path / "log-1").read_text()):
        assert f'train.py", line {line}' in text
    assert attempt.rank_error(0).exists()
    end = read_end(attempt)
    assert (end.verdict.rank, end.verdict.type, end.reason) == (1, "KeyError", "rank 1 failed")


@pytest.mark.parametrize(("last", "code"), [("", 0), ("raise KeyError('column')", 1)])
def test_groups_that_do_not_end_are_not_waited_for(tmp_path, last, code):
    """NCCL waits for its peers, and one of them may be gone."""
    script = (
        "import threading\nimport torch.distributed as dist\nfrom trainkit.loop import attach\n"
        "from trainkit.trainer import distributed\n"
        "dist.destroy_process_group, distributed.GROUPS_END_S = threading.Event().wait, 0.1\n"
        f"for step in attach('run').steps(2):\n    pass\n{last}\n"
    )
    assert start(tmp_path, 1, script=script) == [code]
    assert read_end(RunDir(tmp_path / "run").attempt(1)).exit_code == code


@pytest.mark.parametrize(
    ("values", "losses", "since", "best"),
    [
        ("loss=float('nan') if step > 2 else 1.0", [1.0, 1.0, None, None], 3, None),
        ("loss=1.0, val_loss=1.0 / step", [1.0] * 4, None, Best("val_loss", 0.25, 4)),
    ],
)
def test_a_loss_that_is_nan_does_not_end_the_loop(tmp_path, values, losses, since, best):
    script = (
        "from trainkit.loop import attach\n"
        "run = attach('run')\n"
        "for step in run.steps(4, log_every=1):\n"
        f"    run.log({values})\n"
    )
    assert start(tmp_path, 1, script=script) == [0]
    run = RunDir(tmp_path / "run")
    assert [record["loss"] for record in read_metrics(run)] == losses
    assert diverged_since(run) == since
    assert read_end(run.attempt(1)).best == best


def test_a_rule_keeps_and_saves_checkpoints(tmp_path):
    script = (
        "import torch\n"
        "from trainkit.loop import attach\n"
        "run = attach('run')\n"
        "run.track(model=torch.nn.Linear(2, 2))\n"
        "for keep, keep_last in (('last=x', 3), ('last=1', 2)):\n"
        "    try:\n"
        "        next(run.steps(9, keep=keep, keep_last=keep_last))\n"
        "    except Exception as error:\n"
        "        print('refused:', error)\n"
        "for step in run.steps(9, save_every=3, keep='last=1,every=6,at=5,log_spaced'):\n"
        "    pass\n"
    )
    assert start(tmp_path, 1, script=script) == [0]
    found = published(RunDir(tmp_path / "run").checkpoints_dir)
    assert [checkpoint.step for checkpoint in found] == [1, 2, 4, 5, 6, 8, 9]
    table.said("\n".join(re.findall("refused: .*", (tmp_path / "log-0").read_text())))


def test_a_value_of_one_rank_alone_is_refused(tmp_path):
    """Otherwise, its sum over the ranks would be mixed up with the next gradient."""
    assert start(tmp_path, 2, 12, 0, "main-logs") == [1, 1]
    table.said("\n".join(re.findall(r".*run\.log\(\).*", (tmp_path / "log-0").read_text())))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no-model", "no tracked module contains all parameters of optimizer"),
        ("unserializable", "odd.when cannot be saved"),
    ],
)
def test_what_cannot_be_saved(tmp_path, kind, message):
    """The error comes before the first step."""
    assert start(tmp_path, 1, 12, 0, kind) == [1]
    assert message in (tmp_path / "log-0").read_text()
    record = json.loads((tmp_path / "run" / "attempts" / "001" / "errors" / "rank-0000.json").read_text())
    assert message in record["message"]
    assert (record["step"], record["phase"], record["final"]) == (None, "load", True)
