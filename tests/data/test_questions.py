"""Every row and image of the task multimodal_lm that cannot be trained on is found, with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainkit.cli.main import main
from trainkit.data.questions import QuestionFormat, validate_questions
from trainkit.data.tokenize import Tokenizer
from trainkit.data.validate import LineProblem
from trainkit.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, UsageError

GOOD = {"curve": [1, 2.5, 3], "question": "up?", "answer": "yes"}
BAD_CURVE = "its curve is not a list of at least two finite numbers, or pairs of them"
BAD: list[tuple[Any, str]] = [
    ("{", "it is not JSON: Expecting property name"),
    (b'{"answer": "\xff"}', "it is not UTF-8: byte 0xff at column 13"),
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


def problems(file: Path, medium: Any = "curve", max_tokens: int | None = 60) -> list[LineProblem]:
    found: list[LineProblem] = []
    validate_questions(file, medium, Tokenizer("bytes"), max_tokens, found.append)
    return found


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_row(tmp_path: Path, row: Any, message: str) -> None:
    file = write(tmp_path / "rows.jsonl", [GOOD, "", row, GOOD])
    [found] = problems(file)
    assert (found.file, found.line) == (str(file), 3)
    assert found.message.startswith(message)


def test_good_rows(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [GOOD, "", {**GOOD, "curve": [[0, 1], [1, 2]], "answer": 3}])
    summary = validate_questions(file, "curve", Tokenizer("bytes"), 60, lambda problem: None)
    assert (summary.lines, summary.documents, summary.empty, summary.problems) == (3, 2, 1, 0)
    assert summary.tokens == len("up?\nyes") + 1 + len("up?\n3") + 1


def test_a_file_without_rows(tmp_path: Path) -> None:
    [found] = problems(write(tmp_path / "rows.jsonl", [""]))
    assert (found.line, found.message) == (None, "it has no rows")
    with pytest.raises(UsageError, match="none cannot be read: No such file"):
        problems(tmp_path / "none")


def test_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.effect_noise((64, 64), 50).save(tmp_path / "good.png")
    image.effect_noise((64, 64), 50).save(tmp_path / "good.jpg")
    whole = {kind: (tmp_path / f"good.{kind}").read_bytes() for kind in ("png", "jpg")}
    for kind, content in whole.items():
        (tmp_path / f"cut.{kind}").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.png").write_text("no image")
    names = ["good.png", "good.jpg", "cut.png", "cut.jpg", "text.png", "none.png", "good.png", "cut.png"]
    rows = [{"image": name, "question": "what?", "answer": "noise"} for name in names]
    found = problems(write(tmp_path / "rows.jsonl", rows), "image")
    assert [problem.line for problem in found] == [3, 4, 5, 6, 8]
    assert found[0].message.startswith(f"image {tmp_path / 'cut.png'} cannot be opened: ")
    assert "truncated" in found[1].message
    assert "UnidentifiedImageError" in found[2].message
    assert found[3].message == f"there is no image {tmp_path / 'none.png'}"


def config(folder: Path, rows: list[Any], args: str = ", patch: 4", task: str = "multimodal_lm") -> str:
    train = write(folder / "train.jsonl", rows)
    file = folder / "task.yaml"
    file.write_text(
        f"task: {task}\ndata: {{seq_len: 64}}\ntask_args: {{train: {train}, medium: curve, size: 16{args}}}\n"
    )
    return str(file)


def test_the_files_of_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose patches take 4 of the 64 positions."""
    rows = [GOOD, *[row for row, _ in BAD] * 3]
    assert main(["data", "validate", config(tmp_path, rows)]) == EXIT_FAILED
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    file = tmp_path / "train.jsonl"
    assert len(lines) == 21
    assert lines[0].startswith(f"{file}:2: it is not JSON")
    assert lines[13] == f"{file}:15: it has 105 tokens, more than 60"
    assert lines[20] == f"{file}: {3 * len(BAD) - 20} more problems"
    assert "1 rows to train on" in shown.err
    assert main(["data", "validate", config(tmp_path, rows), "--json"]) == EXIT_FAILED
    value = json.loads(capsys.readouterr().out)
    assert len(value["problems"]) == 3 * len(BAD)
    assert main(["data", "validate", config(tmp_path, [GOOD], ", patch: 4, queries: 2")]) == EXIT_OK


def test_files_without_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "rows.jsonl", [GOOD, {**GOOD, "question": "long " * 2000}])
    assert main(["data", "validate", str(file), "--medium", "curve"]) == EXIT_OK
    assert main(["data", "validate", str(file), "--medium", "image"]) == EXIT_FAILED
    assert f"{file}:1: it has no key 'image'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "task", "message"),
    [
        (", patch: 3", "multimodal_lm", "task_args.patch is 3, which does not divide task_args.size 16"),
        (", patch: 4, queries: 63", "multimodal_lm", "data.seq_len is 64, of which the medium takes 63"),
        (", patch: 4", "causal_lm", "has the task causal_lm"),
    ],
)
def test_configs_without_files_to_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: str, task: str, message: str
) -> None:
    path = config(tmp_path, [GOOD], args, task)
    assert main(["data", "validate", path]) == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_a_config_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, [GOOD])
    assert main(["data", "validate", path, "stdlib"]) == EXIT_USAGE
    assert "give only configs, or only files" in capsys.readouterr().err


@pytest.mark.parametrize("values", [{"medium": "sound"}, {"size": 0}, {"patch": "4"}, {"queries": -1}])
def test_other_arguments(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"task_args.{next(iter(values))} is "):
        QuestionFormat(**values)


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
