"""Plots are drawn for what is known, and only where matplotlib is there."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.support.benches import made_up_bench, train_made_up
from trainkit.bench.measure import Row, point_row, row_of
from trainkit.bench.summary import PLOTS, write_plots

pytest.importorskip("matplotlib")


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    bench = made_up_bench(tmp_path / "bench")
    train_made_up(bench.run_dir(bench.runs[0]))
    return [
        point_row([row_of(bench, bench.runs[0], "finished", "")[0]]),
        point_row([row_of(bench, bench.runs[1], "failed", "no memory")[0]]),
    ]


def test_a_file_for_each_quantity_that_is_known(tmp_path: Path, rows: list[Row]) -> None:
    folder = tmp_path / "plots"
    written, empty = write_plots(["layout"], rows, folder)
    assert empty == ["mfu", "exposed_comm_s"]
    assert [file.stem for file in written] == [name for name in PLOTS if name not in empty]
    assert sorted(folder.iterdir()) == sorted(written)
    for file in written:
        head = file.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", head[16:])
        assert width > 500
        assert height > 100


def test_a_plot_of_what_is_not_known_any_more_is_taken_away(tmp_path: Path, rows: list[Row]) -> None:
    folder = tmp_path / "plots"
    folder.mkdir()
    (folder / "mfu.png").write_bytes(b"old")
    write_plots(["layout"], rows, folder)
    assert not (folder / "mfu.png").exists()


def test_more_layouts_make_a_higher_plot(tmp_path: Path, rows: list[Row]) -> None:
    heights = []
    for count in (1, 10):
        many = [{**rows[0], "layout": f"layout {index}"} for index in range(count)]
        (file, *_) = write_plots(["layout"], many, tmp_path / f"plots-{count}")[0]
        heights.append(struct.unpack(">I", file.read_bytes()[20:24])[0])
    assert heights[1] > 2 * heights[0]
