"""Tests that the commands in benchmarks/ start as their first lines say, and `make gpu` without a GPU."""

import ast
import gc
import json
import os
import random
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu_parts import (
    TINY,
    Bench,
    Loop,
    choose,
    hand_written_loop,
    measure,
    save_state,
    trainkit_loop,
)
from benchmarks.queue_replay import MOST, REQUESTS, WORK_H, Job, Replay, Request, others
from tests.support.programs import run_program
from tests.support.runs import wait_until
from tests.support.said import said

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(r"^ {4}(?:.*\bor: )?python (-m benchmarks\.\w+|benchmarks/\w+\.py)", re.MULTILINE)
OTHER_PATHS = [path for path in sys.path if Path(path or ".").resolve() != ROOT]
FILES = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "def main(" in path.read_text()]


@pytest.mark.filterwarnings("ignore:.* found in sys.modules")  # another test has imported the module
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_starts_as_its_docstring_says(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_what_its_functions_import_exists() -> None:
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


def test_the_fault_campaign_knows_why_trainkit_gives_up() -> None:
    """The campaign takes these reasons for a stop because failures are more frequent than checkpoints."""
    flight = (ROOT / "benchmarks" / "flight.py").read_text()
    decision = (ROOT / "trainkit" / "job" / "decision.py").read_text()
    reasons = re.search(r"^BRAKES = \((.*)\)$", flight, re.MULTILINE)
    found = re.findall(r'"([^"]+)"', reasons[1])
    assert found
    assert [reason for reason in found if reason not in decision] == []


def test_a_replayed_queue_is_fifo_with_backfill() -> None:
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


def test_a_replayed_month_is_that_of_its_seed() -> None:
    def results() -> list[tuple[float, float, int]]:
        jobs = others(0.9 * 16, random.Random(3))
        found = [Replay(16, jobs, request, 200.0).play() for request in REQUESTS]
        return [(result.wait_h, result.result_h, result.num_jobs) for result in found]

    first = results()
    assert first == results()
    by_name = dict(zip((request.name for request in REQUESTS), first, strict=True))
    assert by_name["2-8"][0] <= by_name["8"][0]
    assert by_name["8, slices of 4 h"][2] == 13


def test_without_a_gpu() -> None:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = run_program(sys.executable, "-m", "benchmarks.gpu", cwd=ROOT, env=environ)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "hint: " in done.stderr


def test_what_a_python_lacks_is_one_line_to_copy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"torch": "2.11.0", "gpus": 1, "python": "3.12.3", "missing": ["pydantic", "xdist"]}
    monkeypatch.setattr(gpu, "inspect", lambda environ: found)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    assert gpu.main() == 2
    said(capsys.readouterr().err)


@pytest.mark.slow(seconds=100)
def test_every_bench_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    has_transformers = find_spec("transformers") is not None
    parts = [part for part in gpu.PARTS if part != "tests" and (part != "hugging-face" or has_transformers)]
    asked = ["gpu", "--device", "cpu", "--memory-gib", "80", "--out", str(tmp_path), "--only"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", [*asked, *reversed(parts)])
    code = gpu.main()
    out, err = capfd.readouterr()
    assert code == 0, err
    [file] = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    assert list(record["parts"]) == parts, "in the order of their worth"
    for name, loops in (
        ("1b", ["trainkit", "hand-written"]),
        ("large", ["trainkit", "hand-written"]),
        ("350m", ["trainkit", "hand-written", "trainkit, eager", "trainkit, float32", "trainkit, TF32"]),
    ):
        rows = record["parts"][name]["rows"]
        assert [row["loop"] for row in rows] == loops
        assert all(row["tokens/s"] > 0 and row["of it update ms"] > 0 for row in rows)
    skipped, *masked = record["parts"]["options"]["rows"]
    assert "torchao" in skipped["skipped"]
    assert len(masked) == 2
    assert all(row["tokens/s"] > 0 for row in masked)
    assert [row["keys"] for row in record["parts"]["context"]["rows"]] == [128, 192, 256]
    assert all(row["mask ms"] > 0 for row in record["parts"]["context"]["rows"])
    if has_transformers:
        [row] = record["parts"]["hugging-face"]["rows"]
        assert (row["loop"], row["tokens/s"] > 0) == ("Hugging Face Trainer", True)
    assert all(row["blocked s"] > 0 for row in record["parts"]["save"]["rows"])
    assert sum(row["ms per step"] for row in record["parts"]["profile"]["rows"]) > 0
    [table] = tmp_path.glob("*.md")
    assert table.read_text() == out
    assert "tiny sizes" in out
    # A part that is measured again replaces its rows, and no others.
    monkeypatch.setattr(gpu, "inspect", lambda environ: record["environment"])
    monkeypatch.setattr(sys, "argv", [*asked, "save", "--minutes", "0"])
    assert gpu.main() == 1
    again = json.loads(file.read_text())["parts"]
    assert list(again) == parts
    assert again["large"] == record["parts"]["large"]
    assert (again["save"]["rows"], again["save"]["problem"]) == ([], "0 minutes were over")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_bench_that_is_cut_off_keeps_its_rows(tmp_path: Path, number: signal.Signals) -> None:
    saved = {"date": "2026-01-01", "seconds": 1.0, "rows": [{"way": "trainkit"}]}
    record = tmp_path / f"{gpu.stem_of({'torch': version('torch')})}.json"
    record.write_text(json.dumps({"parts": {"save": saved}}))
    argv = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", str(tmp_path)]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen([*argv, "--only", "350m"], cwd=ROOT, env=environ)

    def parts() -> dict[str, Any]:
        return dict(json.loads(record.read_text())["parts"])

    wait_until(lambda: "350m" in parts())
    process.send_signal(number)
    assert process.wait(60) in (128 + number, -number)
    assert parts()["save"] == saved
    assert (parts()["350m"]["rows"], parts()["350m"]["problem"]) == ([], "cut off")


@pytest.mark.parametrize(
    ("found_gib", "wanted_gib", "gib"),
    [(141, None, 141), (141, 80, 80), (80, 141, 80), (None, None, 80), (None, 141, 141)],
)
def test_the_memory_to_choose_for(found_gib: int | None, wanted_gib: float | None, gib: float) -> None:
    assert gpu.memory_bytes(found_gib and found_gib * 2**30, wanted_gib) == gib * 2**30


@pytest.mark.parametrize(
    ("gib", "preset", "recompute"), [(141, "8b", "selective"), (79, "3b", "none"), (60, "3b", "full")]
)
def test_the_large_model_is_the_largest_that_fits(
    tmp_path: Path, gib: float, preset: str, recompute: str
) -> None:
    choice = choose("large", Bench("cuda", tmp_path, round(0.92 * gib * 2**30)))
    assert (choice.case.preset, choice.recompute) == (preset, recompute)


def test_a_model_that_does_not_fit_has_a_row_that_says_so(tmp_path: Path) -> None:
    assert choose("large", Bench("cuda", tmp_path, 16 * 2**30)) is None
    [row] = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    said(re.sub(r"\d+\.\d", "N", row["skipped"], count=1))


def test_a_state_for_which_the_disk_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=4_000_000))
    save_state(Bench("cpu", tmp_path, 0))  # 1 MB is saved in three ways
    [row] = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert row == {"way": "all", "skipped": f"needs 0.0 GB, {tmp_path} has 0.0 GB"}
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("name", ["trainkit", "hand-written"])
def test_a_model_is_freed_before_the_next_one_is_built(tmp_path: Path, name: str) -> None:
    made = []

    def make() -> Iterator[Loop]:
        own = trainkit_loop(TINY, "cpu", tmp_path / "run", "none")
        for loop in own if name == "trainkit" else hand_written_loop(TINY, "cpu"):
            made.append(weakref.ref(loop.optimizer))
            yield loop

    assert len(measure(make, 3, "cpu").steps_s) == 3
    gc.collect()
    assert [ref() for ref in made] == [None]


@pytest.mark.slow(seconds=40)
@pytest.mark.parametrize(
    "argv",
    [
        ["control_races", "--rounds", "3", "--pair", "cancel-wait", "requeue"],
        ["command_crashes", "--every", "5", "--only", "submit", "cancel", "requeue"],
        pytest.param(
            ["full_disks", "--kib", "12", "24", "40", "--only", "submit", "run"],
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk"),
        ),
    ],
    ids=lambda argv: argv[0],
)
def test_a_part_of_what_is_tried_of_commands(argv: list[str]) -> None:
    done = run_program(sys.executable, "-m", f"benchmarks.{argv[0]}", *argv[1:], cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
