"""Tests that the commands in benchmarks/ start as their first lines say, and `make gpu` without a GPU."""

import ast
import json
import os
import re
import runpy
import shlex
import signal
import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch

from benchmarks import gpu, gpu_parts, training_loop
from benchmarks.gpu_parts import Bench, Times, choose, measure_in_turns
from benchmarks.queue_replay import MOST, WORK_H, Job, Replay, Request
from benchmarks.training_loop import OPPONENTS, Loop, hand_written_loop
from tests.support.hf_models import need
from tests.support.programs import run_program
from tests.support.said import said
from trainkit.trainer.models.model import local_tensor

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(r"^ {4}(?:.*\bor: )?python (-m benchmarks\.\w+|benchmarks/\w+\.py)", re.MULTILINE)
OTHER_PATHS = [path for path in sys.path if Path(path or ".").resolve() != ROOT]
FILES = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "def main(" in path.read_text()]


@pytest.mark.filterwarnings("ignore:.* found in sys.modules")  # another test has imported the module
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_starts_as_its_docstring_says(file, monkeypatch, capsys):
    found = COMMAND.search(file.read_text())
    *module, name = shlex.split(found[1])
    assert file.stem in name
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    # A file finds its neighbours, and a module finds the folder of the checkout.
    monkeypatch.setattr(sys, "path", [str(ROOT if module else file.parent), *OTHER_PATHS])
    run = partial(runpy.run_module, name, alter_sys=True) if module else partial(runpy.run_path, str(file))
    with pytest.raises(SystemExit) as end:
        run(run_name="__main__")
    assert end.value.code in (0, None)
    assert "usage:" in capsys.readouterr().out


def test_what_its_functions_import_exists():
    missing = []
    for file in (ROOT / "benchmarks").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("trainkit", "tests")):
                module = import_module(node.module)
                names = [
                    f"{node.module}.{name.name}" for name in node.names if not hasattr(module, name.name)
                ]
                missing += [(file.name, name) for name in names if not find_spec(name)]
    assert missing == []


def test_a_replayed_queue_is_fifo_with_backfill():
    first, second = Job(0, 6, 6, 10.0, 9.0), Job(1, 8, 8, 5.0, 5.0)
    waits = Replay(8, [first, second], Request("8", MOST, 72.0), 2.0).play()
    assert (waits.wait_h, waits.num_jobs, waits.node_hours) == (12.0, 1, 8 * (WORK_H + 5 / 60))
    # Two nodes are free for less time than the limit of the job, so it needs a lower limit to start.
    behind = Replay(8, [first, second], Request("2-8", 2, 72.0), 2.0).play()
    assert behind.wait_h == 12.0
    gap = Replay(8, [first, second], Request("2-8", 2, 72.0, least_h=4.0), 2.0).play()
    assert (gap.wait_h, gap.num_jobs) == (0.0, 2)
    grown = Replay(8, [first], Request("2-8", 2, 72.0, grows=True), 2.0).play()
    assert (grown.wait_h, grown.num_jobs) == (0.0, 2)
    assert grown.result_h < WORK_H + 9


def test_without_a_gpu():
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = run_program(sys.executable, "-m", "benchmarks.gpu", cwd=ROOT, env=environ)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "hint: " in done.stderr


def test_what_a_python_lacks_is_one_line_to_copy(monkeypatch, capsys):
    found = {"torch": "2.11.0", "gpus": 1, "python": "3.12.3", "missing": ["pydantic", "xdist"]}
    monkeypatch.setattr(gpu, "inspect", lambda environ: found)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    assert gpu.main() == 2
    said(capsys.readouterr().err)


ROWS: dict[str, dict[str, list[Any]]] = {
    "1b": {"loop": ["trainkit", *OPPONENTS]},
    "large": {"loop": ["trainkit", "bound"]},
    "350m": {
        "loop": ["trainkit", *OPPONENTS, "trainkit, eager", "trainkit, float32", "trainkit, TF32"],
    },
    "options": {"loop": [f"trainkit, mask of documents, {way}" for way in ("computed", "read")]},
    "context": {"keys": [128, 192, 256]},
    "save": {"way": ["trainkit", "torch.save and fsync", "DCP async_save"] * 2},
    "hugging-face": {"loop": ["trainkit", "Hugging Face Trainer"]},
}


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("part", ROWS)
def test_a_part_on_a_cpu(tmp_path, part):
    if part == "hugging-face":
        need("transformers")
    try:
        gpu_parts.PARTS[part](Bench("cpu", tmp_path, (130 if part == "large" else 80) * 2**30))
    finally:
        torch.set_float32_matmul_precision("highest")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    measured = [row for row in rows if "skipped" not in row]
    [(key, expected)] = ROWS[part].items()
    assert [row[key] for row in measured] == expected
    figures = ("tokens/s", "mask ms", "blocked s")
    assert all(row[name] > 0 for row in measured for name in figures if name in row)


class Optimizer:
    """An optimizer that does nothing."""

    def step(self) -> None: ...


def test_loops_that_are_compared_take_turns():
    order: list[str] = []
    kept: WeakSet[Optimizer] = WeakSet()

    def make(name):
        order.append(f"build {name} after {len(kept)}")
        optimizer = Optimizer()
        kept.add(optimizer)
        yield Loop(lambda: order.append(name), optimizer)
        order.append(f"free {name}")

    loops = {"a": partial(make, "a"), "b": partial(make, "b")}
    found = measure_in_turns(loops, 4, "cpu", together=True)
    assert order[:6] == ["build a after 0", "a", "a", "build b after 1", "b", "b"]
    assert order[6:14] == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert [len(times.steps_s) for times in found.values()] == [4, 4]
    order.clear()
    found = measure_in_turns(loops, 4, "cpu", together=False)
    built = ["build a after 0", "free a", "build b after 0", "free b"]
    assert [item for item in order if " " in item] == 2 * built
    assert [len(times.steps_s) for times in found.values()] == [4, 4]


def test_the_hand_written_loops_compute_the_same(monkeypatch):
    """The loops `careful` and `autocast` differ only in dtypes and memory, so float32 updates are equal."""
    shape = gpu_parts.TINY.shape
    monkeypatch.setattr(training_loop, "MAX_CHUNK_LOGITS", shape.vocab_size * 12)  # chunks of unequal lengths
    micros = [
        (tokens[:, :-1], tokens[:, 1:], torch.zeros(2, dtype=torch.int32))
        for tokens in torch.randint(0, 256, (2, 2, 17), generator=torch.Generator().manual_seed(0))
    ]
    found = {}
    with gpu_parts.process_group("cpu"):
        for kind in OPPONENTS:
            torch.manual_seed(0)
            loop = hand_written_loop(kind, shape, micros, "fp32")
            for _ in range(2):
                loop.step()
            params = loop.optimizer.param_groups[0]["params"]
            states = loop.optimizer.state[params[0]]
            found[kind] = torch.cat([local_tensor(param).detach().flatten() for param in params])
            dtype = torch.bfloat16 if kind == "bound" else torch.float32
            assert {found[kind].dtype, states["exp_avg"].dtype} == {dtype}
    assert (found["careful"] - found["autocast"]).abs().max() < 1e-6


def test_a_speed_has_an_interval_and_two_kinds_of_mfu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    times = Times(9.0, [0.1, 0.1, 0.1, 0.2], conditions=[{"SM MHz": 1900}, {"SM MHz": 1980}])
    case = gpu_parts.CASES["1b"][0]
    row = gpu_parts.speed_row(case, Bench("cuda", tmp_path, 0), "careful", "none", times)
    assert (row["tokens/s"], row["95 %"], row["SM MHz"]) == (163840, "81920 to 163840", 1940)
    attention = 6 * 16 * 2048 * 4096 * 163840 / 989e12
    assert row["MFU"] - row["MFU, causal"] == pytest.approx(attention, abs=1e-3)
    twice = {**row, "loop": "trainkit", "tokens/s": 327680, "steps_ms": [50.0, 50.0, 50.0, 50.0]}
    parts = {"1b": {"rows": [twice, row, {**row, "loop": "bound"}]}}
    assert list(gpu.goals(parts)) == [
        "1b, 1 x 4 x 4096: 2.00 x careful, 2.00 to 4.00 (reached)",
        "1b, 1 x 4 x 4096: 2.00 x bound, 2.00 to 4.00",
    ]


@pytest.mark.parametrize("file", sorted(gpu.RECORDS.glob("*.json")), ids=lambda file: file.stem)
def test_earlier_records_stay_readable(file):
    record = json.loads(file.read_text())
    assert gpu.markdown(record) == file.with_suffix(".md").read_text()
    assert any("hand-written" in goal for goal in gpu.goals(record["parts"]))


@pytest.mark.slow
def test_the_record_of_the_parts(tmp_path, monkeypatch, capfd):
    asked = ["gpu", "--device", "cpu", "--memory-gib", "80", "--out", str(tmp_path), "--only"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", [*asked, "save", "profile"])
    code = gpu.main()
    out, err = capfd.readouterr()
    assert code == 0, err
    [file] = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    assert list(record["parts"]) == ["profile", "save"], "in the order of their worth"
    assert sum(row["ms per step"] for row in record["parts"]["profile"]["rows"]) > 0
    assert {part["commit"] for part in record["parts"].values()} == {gpu.commit_of(ROOT)}
    [table] = tmp_path.glob("*.md")
    assert table.read_text() == out
    # A part that is measured again replaces its rows, and no others.
    monkeypatch.setattr(gpu, "inspect", lambda environ: record["environment"])
    monkeypatch.setattr(sys, "argv", [*asked, "save", "--minutes", "0"])
    assert gpu.main() == 1
    again = json.loads(file.read_text())["parts"]
    assert again["profile"] == record["parts"]["profile"]
    assert (again["save"]["rows"], again["save"]["problem"]) == ([], "0 minutes were over")


def test_the_large_model_is_the_largest_that_fits(tmp_path):
    found = [choose("large", Bench("cuda", tmp_path, round(0.92 * gib * 2**30))) for gib in (141, 79, 52, 16)]
    chosen = [choice and (choice.case.preset, choice.recompute) for choice in found]
    assert chosen == [("8b", "none"), ("3b", "none"), ("3b", "selective"), None]


@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize(
    "argv",
    [
        ["control_races", "--rounds", "1", "--pair", "cancel-wait", "requeue"],
        ["command_crashes", "--every", "20", "--only", "submit", "cancel"],
        pytest.param(
            ["full_disks", "--kib", "24", "--only", "submit"],
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk"),
        ),
    ],
    ids=lambda argv: argv[0],
)
def test_a_part_of_what_is_tried_of_commands(argv):
    done = run_program(sys.executable, "-m", f"benchmarks.{argv[0]}", *argv[1:], cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
