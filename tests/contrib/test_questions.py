"""Every row and image of the task multimodal_lm that cannot be trained on is found, with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainkit.cli.main import main
from trainkit.contrib.multimodal.task import MediumFormat, MediumSamples
from trainkit.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, UsageError

GOOD = {"curve": [1, 2.5, 3], "question": "up?", "answer": "yes"}
BAD_CURVE = "its curve is not a list of at least two finite numbers, or pairs of them"
BAD: list[tuple[Any, str]] = [
    ("{", "it is not JSON in UTF-8: Expecting property name"),
    (b'{"answer": "\xff"}', "it is not JSON in UTF-8: 'utf-8' codec can't decode byte 0xff in position 12"),
    ([1], "it is not an object"),
    ({"question": "a", "answer": "b"}, "it has no key 'curve'"),
    ({**GOOD, "question": " "}, "its question is empty"),
    ({**GOOD, "answer": ""}, "its answer is empty"),
    ({**GOOD, "answer": None}, "its answer is empty"),
    ({**GOOD, "answer": "\ud800"}, "its answer contains an unpaired surrogate"),
    ({**GOOD, "curve": [1, float("nan")]}, BAD_CURVE),
    ({**GOOD, "curve": [1]}, BAD_CURVE),
    ({**GOOD, "curve": [[0, 1], [1]]}, BAD_CURVE),
    ({**GOOD, "curve": [[0, 1, 2], [1, 2, 3]]}, BAD_CURVE),
    ({**GOOD, "curve": "1, 2"}, BAD_CURVE),
    ({**GOOD, "question": "long " * 20}, "it has 105 tokens, more than 60"),
]


def write(file: Path, rows: list[Any]) -> Path:
    lines = [
        row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
        for row in rows
    ]
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    return file


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_row(tmp_path: Path, row: Any, message: str) -> None:
    file = write(tmp_path / "rows.jsonl", [GOOD, "", row, {**GOOD, "curve": [[0, 1], [1, 2]], "answer": 3}])
    with pytest.raises(UsageError) as caught:
        MediumSamples(file, MediumFormat("curve", 16, 4), "bytes", 60)
    assert caught.value.message.startswith(f"{file}:3: {message}")
    assert "\n" not in caught.value.message
    assert caught.value.hint


def config(folder: Path, rows: list[Any], args: str = "medium: curve, size: 16, patch: 4") -> str:
    train = write(folder / "train.jsonl", rows)
    file = folder / "task.yaml"
    file.write_text(
        f"task: multimodal_lm\ndata: {{seq_len: 64, num_workers: 0}}\ntask_args: {{train: {train}, {args}}}\n"
    )
    return str(file)


@pytest.mark.slow
def test_the_rows_and_images_of_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The patches of a curve take 4 of the 64 positions."""
    assert main(["data", "validate", config(tmp_path, [GOOD, *[row for row, _ in BAD] * 3])]) == EXIT_FAILED
    shown = capsys.readouterr()
    lines, file = shown.out.splitlines(), tmp_path / "train.jsonl"
    assert len(lines) == 21
    assert lines[0].startswith(f"task is multimodal_lm, but {file}:2: it is not JSON")
    assert lines[13] == f"{file}:15: it has 105 tokens, more than 60"
    assert lines[20] == f"and {3 * len(BAD) - 20} more"
    assert "1 problems" in shown.err
    image = pytest.importorskip("PIL.Image")
    image.effect_noise((64, 64), 50).save(tmp_path / "good.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:999])
    rows = [
        {"image": name, "question": "what?", "answer": "noise"}
        for name in ("good.png", "cut.png", "good.png")
    ]
    assert main(["data", "validate", config(tmp_path, rows, "medium: image"), "--json"]) == EXIT_FAILED
    [found] = json.loads(capsys.readouterr().out)["problems"]
    assert f"sample 1: ValueError: image {tmp_path / 'cut.png'} cannot be opened: " in found


def test_configs_without_files_to_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, [GOOD])
    assert main(["data", "validate", path, "stdlib"]) == EXIT_USAGE
    assert "is a config, which names its files" in capsys.readouterr().err
    Path(path).write_text("task: causal_lm\n")
    assert main(["data", "validate", path]) == EXIT_USAGE
    assert "task is causal_lm" in capsys.readouterr().err


OWN = """
import torch
from torch import nn
from trainkit.task import Loss, Task

class Rows(list):
    def __getitem__(self, index):
        if index % 4 == 3:
            raise KeyError("column")
        return super().__getitem__(index)

class Mine(Task):
    def build_model(self): return nn.Linear(1, 1)
    def train_dataset(self): return Rows(range(100))
    def val_dataset(self): return [1, 2]
    def loss(self, model, batch): return Loss(model(batch).sum(), len(batch))
"""


@pytest.mark.slow
def test_the_samples_of_an_own_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = tmp_path / "mine.py"
    code.write_text(OWN)
    (tmp_path / "mine.yaml").write_text(f"task: {code}:Mine\n")
    assert main(["data", "validate", str(tmp_path / "mine.yaml")]) == EXIT_FAILED
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0] == f"train_dataset() sample 3: KeyError: 'column' ({code}:9)"
    assert (len(lines), lines[20]) == (21, f"{code}:Mine: 5 more problems")
    assert "25 problems" in shown.err
    code.write_text(OWN.replace("== 3", "== 5"))
    assert main(["data", "validate", str(tmp_path / "mine.yaml"), "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["problems"] == []
