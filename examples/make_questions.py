"""Writes small files for the task ``multimodal_lm``: questions about drawn shapes and about curves.

    python examples/make_questions.py DATA

DATA/images/train.jsonl and val.jsonl have a picture, a question and an answer in every line, DATA/curves/ has
a curve instead of the picture. Needs Pillow.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
SHAPES = ("circle", "square", "triangle")
PIXELS = 32
POINTS = 64


def draw(shape: str, colour: str, rng: random.Random) -> Image.Image:
    """A picture with one shape at a random place."""
    image = Image.new("RGB", (PIXELS, PIXELS), (15, 15, 15))
    size = rng.randint(12, 20)
    left, top = rng.randint(0, PIXELS - size), rng.randint(0, PIXELS - size)
    right, bottom = left + size, top + size
    pen = ImageDraw.Draw(image)
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=COLOURS[colour])
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=COLOURS[colour])
    else:
        pen.polygon(((left, bottom), (right, bottom), ((left + right) // 2, top)), fill=COLOURS[colour])
    return image


def image_rows(folder: Path, split: str, count: int, rng: random.Random) -> list[dict[str, object]]:
    """Rows about pictures, which are written next to them."""
    rows: list[dict[str, object]] = []
    for number in range(count):
        shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
        name = f"{split}-{number:05d}.png"
        draw(shape, colour, rng).save(folder / name)
        question, answer = rng.choice((("Which colour?", colour), ("Which shape?", shape)))
        rows.append({"image": name, "question": question, "answer": answer})
    return rows


def curve_rows(count: int, rng: random.Random) -> list[dict[str, object]]:
    """Rows about curves of (time, value) pairs at random times."""
    rows: list[dict[str, object]] = []
    for _ in range(count):
        kind = rng.choice(("rising", "falling", "periodic"))
        times = sorted(rng.random() for _ in range(POINTS))
        slope, phase = rng.uniform(0.8, 1.5), rng.uniform(0, 2 * math.pi)
        values = {
            "rising": [slope * t for t in times],
            "falling": [-slope * t for t in times],
            "periodic": [math.sin(6 * math.pi * t + phase) for t in times],
        }[kind]
        curve = [[round(t, 4), round(v + rng.gauss(0, 0.05), 4)] for t, v in zip(times, values, strict=True)]
        rows.append({"curve": curve, "question": "How does it go?", "answer": kind})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DATA", help="folder to create")
    parser.add_argument("--train", type=int, default=2000, help="rows for training")
    parser.add_argument("--val", type=int, default=200, help="rows for validation")
    args = parser.parse_args()
    rng = random.Random(0)
    for kind in ("images", "curves"):
        folder = args.folder / kind
        folder.mkdir(parents=True)
        for split, count in (("train", args.train), ("val", args.val)):
            rows = image_rows(folder, split, count, rng) if kind == "images" else curve_rows(count, rng)
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
