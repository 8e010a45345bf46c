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

import pytest
import torch

from benchmarks import gpu, gpu_parts
from benchmarks.gpu_parts import Bench, choose
from benchmarks.queue_replay import MOST, WORK_H, Job, Replay, Request
from tests.support.hf_models import need
from tests.support.programs import run_program
from tests.support.said import said

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
    "1b": {"loop": ["trainkit", "hand-written"]},
    "350m": {"loop": ["trainkit", "hand-written", "trainkit, eager", "trainkit, float32", "trainkit, TF32"]},
    "options": {"loop": [f"trainkit, mask of documents, {way}" for way in ("computed", "read")]},
    "context": {"keys": [128, 192, 256]},
    "save": {"way": ["trainkit", "torch.save and fsync", "DCP async_save"] * 2},
    "hugging-face": {"loop": ["Hugging Face Trainer"]},
}


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("part", ROWS)
def test_a_part_on_a_cpu(tmp_path, part):
    if part == "hugging-face":
        need("transformers")
    try:
        gpu_parts.PARTS[part](Bench("cpu", tmp_path, 80 * 2**30))
    finally:
        torch.set_float32_matmul_precision("highest")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    measured = [row for row in rows if "skipped" not in row]
    [(key, expected)] = ROWS[part].items()
    assert [row[key] for row in measured] == expected
    figures = ("tokens/s", "mask ms", "blocked s")
    assert all(row[name] > 0 for row in measured for name in figures if name in row)


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
    found = [choose("large", Bench("cuda", tmp_path, round(0.92 * gib * 2**30))) for gib in (141, 79, 60, 16)]
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
