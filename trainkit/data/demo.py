"""Built-in rows for ``multimodal_lm``: questions about drawn shapes and about curves."""

from __future__ import annotations

import math
import random
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainkit.data.questions import Medium

DEMO = "demo"
"""The name of the rows in a config, in place of a file."""
NUM_ROWS = {"train": 2000, "val": 200}
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
SHAPES = ("circle", "square", "triangle")
TRENDS = ("rising", "falling", "periodic")
PIXELS = 32
POINTS = 64
Split = Literal["train", "val"]


def demo_rows(medium: Medium, split: Split, count: int | None = None) -> list[dict[str, Any]]:
    """`count` rows, by default 2,000 for training and 200 for validation, which are always the same.

    They have a ``question``, an ``answer``, and an ``image`` (uint8 [32, 32, 3]) or a ``curve`` (64 pairs of
    time and value).
    """
    rng = random.Random(f"{medium}/{split}")
    make = _image_row if medium == "image" else _curve_row
    return [make(rng) for _ in range(NUM_ROWS[split] if count is None else count)]


def _image_row(rng: random.Random) -> dict[str, Any]:
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


def _curve_row(rng: random.Random) -> dict[str, Any]:
    """A curve at random times, with noise."""
    trend = rng.choice(TRENDS)
    slope, phase = rng.uniform(0.8, 1.5), rng.uniform(0, 2 * math.pi)
    curve = []
    for time in sorted(rng.random() for _ in range(POINTS)):
        value = math.sin(6 * math.pi * time + phase) if trend == "periodic" else slope * time
        value = -value if trend == "falling" else value
        curve.append([round(time, 4), round(value + rng.gauss(0, 0.05), 4)])
    return {"curve": curve, "question": "How does it go?", "answer": trend}
