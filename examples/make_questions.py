"""Write the built-in rows of the task ``multimodal_lm`` to files, in the format for your own data.

    python examples/make_questions.py DATA

Each line of DATA/images/train.jsonl and val.jsonl contains an image, a question and an answer. The files in
DATA/curves/ contain a curve instead of the image. The script needs Pillow.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from PIL import Image

from trainkit.capabilities.multimodal import demo_rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DATA", help="folder to create")
    parser.add_argument("--train", type=int, default=2000, help="rows for training")
    parser.add_argument("--val", type=int, default=200, help="rows for validation")
    args = parser.parse_args()
    for medium in ("image", "curve"):
        folder = args.folder / f"{medium}s"
        folder.mkdir(parents=True)
        for split, count in (("train", args.train), ("val", args.val)):
            rows = demo_rows(medium, split, count)
            for number, row in enumerate(rows):
                if medium == "image":
                    name = f"{split}-{number:05d}.png"
                    Image.fromarray(row["image"]).save(folder / name)
                    row["image"] = name
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
