"""The rows of the task multimodal_lm: an image or a curve, a question and its answer."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainkit.data.tokenize import Tokenizer
from trainkit.data.validate import LineProblem, OnProblem, SourceSummary
from trainkit.errors import UsageError
from trainkit.formats import JsonObject

Medium = Literal["image", "curve"]


@dataclass(frozen=True)
class QuestionFormat:
    """The arguments of the task that say which rows it takes, with their defaults."""

    medium: Medium = "image"
    size: int = 32
    patch: int = 8
    queries: int = 0

    def __post_init__(self) -> None:
        """Raise UsageError for values that the task does not take."""
        if self.medium not in ("image", "curve"):
            raise UsageError(f"task_args.medium is {self.medium}", hint="it is image or curve")
        for name, least in (("size", 1), ("patch", 1), ("queries", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                hint = f"it is a whole number of at least {least}"
                raise UsageError(f"task_args.{name} is {value}", hint=hint)
        if self.size % self.patch:
            message = f"task_args.patch is {self.patch}, which does not divide task_args.size {self.size}"
            raise UsageError(message)

    def max_tokens(self, seq_len: int) -> int:
        """Tokens that a row may have; raises UsageError if the medium leaves no room for any."""
        taken = self.queries or num_patches(self.medium, self.size, self.patch)
        if seq_len - taken < 2:
            raise UsageError(f"data.seq_len is {seq_len}, of which the medium takes {taken}")
        return seq_len - taken


def num_patches(medium: Medium, size: int, patch: int) -> int:
    """Patches of an image of `size` x `size` pixels, or of a curve of `size` points."""
    sides = size // patch
    return sides * sides if medium == "image" else sides


def read_row(line: bytes, medium: Medium, folder: Path) -> JsonObject:
    """The object of one line; raises ValueError, without the place, unless a task can train on it.

    Images are looked for in `folder`, and not opened.
    """
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"it is not UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError("it is not an object")
    for key in (medium, "question", "answer"):
        if key not in row:
            raise ValueError(f"it has no key {key!r}")
    for key in ("question", "answer"):
        if row[key] is None or not str(row[key]).strip():
            raise ValueError(f"its {key} is empty")
        try:
            str(row[key]).encode()
        except UnicodeEncodeError:
            raise ValueError(f"its {key} contains an unpaired surrogate") from None
    if medium == "image":
        if not (folder / str(row["image"])).is_file():
            raise ValueError(f"there is no image {folder / str(row['image'])}")
    else:
        _check_curve(row["curve"])
    return row


def _check_curve(points: Any) -> None:
    """Raise ValueError unless it is a list of numbers, or of pairs of a time and a number."""
    try:
        found = np.asarray(points, dtype=np.float64)
    except (ValueError, TypeError):
        found = np.empty(0)
    is_curve = found.ndim == 1 or (found.ndim == 2 and found.shape[1] == 2)
    if not is_curve or len(found) < 2 or not np.isfinite(found).all():
        raise ValueError("its curve is not a list of at least two finite numbers, or pairs of them")


def token_count(row: JsonObject, tokenizer: Tokenizer) -> int:
    """Tokens of a row: the question, the answer and the end of the text."""
    return sum(map(len, tokenizer.encode(row_texts(row)))) + 1


def row_texts(row: JsonObject) -> list[bytes]:
    """The question and the answer, as they are tokenised."""
    return [f"{row['question']}\n".encode(), str(row["answer"]).encode()]


def too_long(num_tokens: int, max_tokens: int) -> str:
    """What is wrong with a row that does not fit."""
    return f"it has {num_tokens} tokens, more than {max_tokens}"


def validate_questions(
    file: Path, medium: Medium, tokenizer: Tokenizer, max_tokens: int | None, on_problem: OnProblem
) -> SourceSummary:
    """Check every row, and decode every image once; without `max_tokens` a row may have any length.

    Raises UsageError if Pillow is missing or the file cannot be read.
    """
    summary = SourceSummary(str(file))
    seen: dict[Path, str] = {}
    for number, line in enumerate(_lines(file), 1):
        summary.lines = number
        if not line.strip():
            summary.empty += 1
            continue
        try:
            row = read_row(line, medium, file.parent)
            num_tokens = token_count(row, tokenizer)
            if max_tokens is not None and num_tokens > max_tokens:
                raise ValueError(too_long(num_tokens, max_tokens))
            if medium == "image":
                path = file.parent / str(row["image"])
                if path not in seen:
                    seen[path] = _image_problem(path)
                if seen[path]:
                    raise ValueError(seen[path])
        except ValueError as error:
            summary.problems += 1
            on_problem(LineProblem(str(file), number, str(error)))
            continue
        summary.documents += 1
        summary.tokens += num_tokens
    if not summary.documents and not summary.problems:
        summary.problems += 1
        on_problem(LineProblem(str(file), None, "it has no rows"))
    return summary


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as stream:
            yield from stream
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None


def _image_problem(file: Path) -> str:
    """Why an image cannot be decoded; empty if it can."""
    try:
        from PIL import Image
    except ImportError:
        hint = "pip install 'trainkit[vision]'"
        raise UsageError("images need Pillow, which is not installed", hint=hint) from None
    try:
        with Image.open(file) as image:
            image.convert("RGB")
    except Exception as error:  # its decoders raise errors of many types
        return f"image {file} cannot be opened: {type(error).__name__}: {error}"
    return ""


DEMO = "demo"
"""The name of the rows in a config, in place of a file."""
NUM_ROWS = {"train": 2000, "val": 200}
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
SHAPES = ("circle", "square", "triangle")
TRENDS = ("rising", "falling", "periodic")
PIXELS = 32
POINTS = 64
Split = Literal["train", "val"]


def demo_rows(medium: Medium, split: Split, count: int | None = None) -> list[JsonObject]:
    """`count` rows, by default 2,000 for training and 200 for validation, which are always the same.

    They have a ``question``, an ``answer``, and an ``image`` (uint8 [32, 32, 3]) or a ``curve`` (64 pairs of
    time and value).
    """
    rng = random.Random(f"{medium}/{split}")
    make = _image_row if medium == "image" else _curve_row
    return [make(rng) for _ in range(NUM_ROWS[split] if count is None else count)]


def _image_row(rng: random.Random) -> JsonObject:
    shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
    question, answer = rng.choice((("Which colour?", colour), ("Which shape?", shape)))
    return {"image": _draw(shape, colour, rng), "question": question, "answer": answer}


def _draw(shape: str, colour: str, rng: random.Random) -> npt.NDArray[np.uint8]:
    """A picture with one shape at a random place."""
    size = rng.randint(12, 20)
    left, top = rng.randint(0, PIXELS - size), rng.randint(0, PIXELS - size)
    y, x = np.mgrid[:PIXELS, :PIXELS]
    right, down = (x - left) / size, (y - top) / size  # 0 to 1 inside
    inside = (right >= 0) & (right <= 1) & (down >= 0) & (down <= 1)
    if shape == "circle":
        inside = (right - 0.5) ** 2 + (down - 0.5) ** 2 <= 0.25
    elif shape == "triangle":
        inside &= abs(right - 0.5) <= down / 2
    picture = np.full((PIXELS, PIXELS, 3), 15, dtype=np.uint8)
    picture[inside] = COLOURS[colour]
    return picture


def _curve_row(rng: random.Random) -> JsonObject:
    """A curve at random times, with noise."""
    trend = rng.choice(TRENDS)
    slope, phase = rng.uniform(0.8, 1.5), rng.uniform(0, 2 * math.pi)
    curve = []
    for time in sorted(rng.random() for _ in range(POINTS)):
        value = math.sin(6 * math.pi * time + phase) if trend == "periodic" else slope * time
        value = -value if trend == "falling" else value
        curve.append([round(time, 4), round(value + rng.gauss(0, 0.05), 4)])
    return {"curve": curve, "question": "How does it go?", "answer": trend}
