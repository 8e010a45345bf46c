"""Reads and generates rows for the task ``multimodal_lm``.

A row consists of an image or a curve, a question and its answer.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

Medium = Literal["image", "curve"]


def read_row(line: bytes, medium: Medium, folder: Path) -> dict[str, object]:
    """Parse one line of a data file; raise ValueError if the task cannot train on it.

    The error message names neither the file nor the line.

    The image file must exist in `folder`, but is not opened.
    """
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the line is not JSON in UTF-8: {error}") from None
    if not isinstance(row, dict):
        raise ValueError("the line is not a JSON object")
    for key in (medium, "question", "answer"):
        if key not in row:
            raise ValueError(f"the row has no key {key!r}")
    for key in ("question", "answer"):
        if row[key] is None or not str(row[key]).strip():
            raise ValueError(f"the row's {key} is empty")
        try:
            str(row[key]).encode()
        except UnicodeEncodeError:
            raise ValueError(f"the row's {key} contains an unpaired surrogate") from None
    if medium == "image":
        if not (folder / str(row["image"])).is_file():
            raise ValueError(f"the image {folder / str(row['image'])} does not exist")
    else:
        _check_curve(row["curve"])
    return row


def _check_curve(points: object) -> None:
    """Raise ValueError unless `points` is a list of numbers or of (time, number) pairs."""
    try:
        found = np.asarray(points, dtype=np.float64)
    except (ValueError, TypeError):
        found = np.empty(0)
    is_curve = found.ndim == 1 or (found.ndim == 2 and found.shape[1] == 2)
    if not is_curve or len(found) < 2 or not np.isfinite(found).all():
        raise ValueError(
            "the row's curve is not a list of at least two finite numbers or pairs of finite numbers"
        )


def row_texts(row: Mapping[str, object]) -> list[bytes]:
    """Return the question and the answer as bytes for the tokenizer."""
    return [f"{row['question']}\n".encode(), str(row["answer"]).encode()]


DEMO = "demo"
"""Config value that selects the built-in rows instead of a file."""
NUM_ROWS = {"train": 2000, "val": 200}
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
SHAPES = ("circle", "square", "triangle")
TRENDS = ("rising", "falling", "periodic")
PIXELS = 32
POINTS = 64
Split = Literal["train", "val"]


def demo_rows(medium: Medium, split: Split, count: int | None = None) -> list[dict[str, object]]:
    """Generate `count` rows (default: 2,000 for training, 200 for validation), identical in each call.

    A row has a ``question``, an ``answer``, and either an ``image``, uint8 [32, 32, 3], or a ``curve`` with
    64 (time, value) pairs.
    """
    rng = random.Random(f"{medium}/{split}")
    make = _image_row if medium == "image" else _curve_row
    return [make(rng) for _ in range(NUM_ROWS[split] if count is None else count)]


def _image_row(rng: random.Random) -> dict[str, object]:
    shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
    question, answer = rng.choice((("Which colour?", colour), ("Which shape?", shape)))
    return {"image": _draw(shape, colour, rng), "question": question, "answer": answer}


def _draw(shape: str, colour: str, rng: random.Random) -> npt.NDArray[np.uint8]:
    """Draw one shape at a random position."""
    size = rng.randint(12, 20)
    left, top = rng.randint(0, PIXELS - size), rng.randint(0, PIXELS - size)
    y, x = np.mgrid[:PIXELS, :PIXELS]
    right, down = (
        (x - left) / size,
        (y - top) / size,
    )  # coordinates from 0 to 1 within the shape's bounding box
    inside = (right >= 0) & (right <= 1) & (down >= 0) & (down <= 1)
    if shape == "circle":
        inside = (right - 0.5) ** 2 + (down - 0.5) ** 2 <= 0.25
    elif shape == "triangle":
        inside &= abs(right - 0.5) <= down / 2
    picture = np.full((PIXELS, PIXELS, 3), 15, dtype=np.uint8)
    picture[inside] = COLOURS[colour]
    return picture


def _curve_row(rng: random.Random) -> dict[str, object]:
    """Generate a noisy curve, sampled at random times."""
    trend = rng.choice(TRENDS)
    slope, phase = rng.uniform(0.8, 1.5), rng.uniform(0, 2 * math.pi)
    curve = []
    for time in sorted(rng.random() for _ in range(POINTS)):
        value = math.sin(6 * math.pi * time + phase) if trend == "periodic" else slope * time
        value = -value if trend == "falling" else value
        curve.append([round(time, 4), round(value + rng.gauss(0, 0.05), 4)])
    return {"curve": curve, "question": "How does it go?", "answer": trend}
