"""The summary of a bench as text: the lines of summary.csv, and a table to read."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from trainkit.bench.columns import COLUMNS
from trainkit.bench.measure import Row
from trainkit.observe.words import table

LONGEST_VERDICT = 70
# Column, heading, how its values are written.
_SHOWN = (
    ("layout", "LAYOUT", ""),
    ("device_batch_size", "BATCH", ""),
    ("samples_per_s", "SAMPLES/S", ",.1f"),
    ("tokens_per_s", "TOKENS/S", ",.0f"),
    ("tokens_per_s_per_gpu", "A GPU", ",.0f"),
    ("mfu", "MFU", ".1%"),
    ("step_s", "STEP S", ".4f"),
    ("data_wait_s", "DATA S", ".4f"),
    ("exposed_comm_s", "COMM S", ".4f"),
    ("mem_gib_peak", "GIB", ".2f"),
    ("loss", "LOSS", ".4f"),
    ("status", "STATUS", ""),
)


def csv_text(rows: Sequence[Row]) -> str:
    """The bytes of summary.csv: numbers with six digits, an empty cell for what is not known."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_cell(row[name]) for name in COLUMNS] for row in rows)
    return stream.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return format(value, ".6g") if isinstance(value, float) else str(value)


def summary_table(rows: Sequence[Row]) -> str:
    """One line a layout, and below them why some have no numbers."""
    heading = [heading for _, heading, _ in _SHOWN]
    values = [[_shown(row[name], spec) for name, _, spec in _SHOWN] for row in rows]
    lines = [table([heading, *values])]
    lines += [f"{row['layout']}: {_cut(row['verdict'])}" for row in rows if row["verdict"]]
    return "\n".join(lines)


def _shown(value: Any, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_VERDICT else line[: LONGEST_VERDICT - 1] + "…"
