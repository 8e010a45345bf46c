"""Tests images, histograms and texts: the accepted values, the written files, and how they are read."""

import json
import math
import zlib
from io import BytesIO
from pathlib import Path
from threading import Event, Timer

import numpy as np
import pytest
import torch

from tests.support.runs import make_attempt
from tests.support.said import said
from trainkit.capabilities.media import recorder as recorder_module
from trainkit.capabilities.media import staging
from trainkit.capabilities.media.items import (
    image_file,
    index_file,
    media_dir,
    read_image,
    read_items,
    summary,
)
from trainkit.capabilities.media.png import encode_png
from trainkit.capabilities.media.recorder import MediaRecorder
from trainkit.capabilities.media.section import render
from trainkit.capabilities.media.staging import MAX_SIDE, NUM_BINS, stage_histogram, stage_image
from trainkit.errors import UsageError
from trainkit.run.events import read_events
from trainkit.run.files import append_jsonl
from trainkit.run.history import RunHistory
from trainkit.shipped import load
from trainkit.trainer.progress import Progress


@pytest.fixture
def attempt(tmp_path: Path):
    return make_attempt(tmp_path / "run")


def recorder(attempt, step: int | None = None, phase: str = "forward") -> MediaRecorder:
    progress = Progress()
    if step is not None:
        progress.begin_step(step)
    progress.enter(phase)
    return MediaRecorder(attempt, progress, None)


def decoded(png: bytes) -> np.ndarray:
    """Return the pixels of a PNG without filters as [height, width, channels]."""
    width, height, _, kind = (*(int.from_bytes(png[at : at + 4], "big") for at in (16, 20)), png[24], png[25])
    channels = {0: 1, 2: 3, 6: 4}[kind]
    start = png.index(b"IDAT")
    length = int.from_bytes(png[start - 4 : start], "big")
    rows = np.frombuffer(zlib.decompress(png[start + 4 : start + 4 + length]), dtype=np.uint8)
    return rows.reshape(height, 1 + width * channels)[:, 1:].reshape(height, width, channels)


def pillow(mode: str):
    return pytest.importorskip("PIL.Image").new(mode, (3, 2), 1)


COLOURS = torch.arange(18).reshape(3, 2, 3)
IMAGES = {
    # Maps a name to an image of 2 x 3 pixels, its number of channels and its first pixel.
    "CHW": (COLOURS.to(torch.uint8), 3, [0, 6, 12]),
    "HW": (torch.tensor([[0.0, 0.5, 1.0]] * 2), 1, [0]),
    "1HW": (torch.full((1, 2, 3), 0.25), 1, [64]),
    "RGBA": (torch.ones(4, 2, 3), 4, [255] * 4),
    "below 0 and above 1": (torch.full((3, 2, 3), -7.0), 3, [0] * 3),
    "large": (torch.full((2, 3), 1e30), 1, [255]),
    "nan": (torch.full((2, 3), float("nan")), 1, [0]),
    "inf": (torch.full((2, 3), float("inf")), 1, [255]),
    "bool": (torch.ones(2, 3, dtype=torch.bool), 1, [255]),
    "int64": (torch.full((2, 3), 300), 1, [255]),
    "negative int": (torch.full((2, 3), -300), 1, [0]),
    "uint16": (torch.full((2, 3), 300, dtype=torch.uint16), 1, [255]),
    "numpy uint32": (np.full((2, 3), 7, dtype=np.uint32), 1, [7]),
    "bf16": (torch.full((2, 3), 0.5, dtype=torch.bfloat16), 1, [128]),
    "with gradient": (torch.ones(2, 3, requires_grad=True), 1, [255]),
    "not contiguous": (COLOURS.to(torch.uint8).flip(1).transpose(1, 2).transpose(1, 2), 3, [3, 9, 15]),
    "numpy HWC": (np.arange(18, dtype=np.uint8).reshape(2, 3, 3), 3, [0, 1, 2]),
    "numpy HW": (np.full((2, 3), 0.5), 1, [128]),
    "numpy reversed": (np.arange(18, dtype=np.uint8).reshape(2, 3, 3)[:, ::-1], 3, [6, 7, 8]),
}


@pytest.mark.parametrize("name", IMAGES)
def test_what_is_an_image(name):
    image, channels, first = IMAGES[name]
    pixels = stage_image("it", image).wait()
    assert (pixels.shape, pixels.dtype) == ((2, 3, channels), torch.uint8)
    assert pixels[0, 0].tolist() == first


@pytest.mark.parametrize(
    ("mode", "channels"), [("L", 1), ("RGB", 3), ("RGBA", 4), ("P", 3), ("1", 3), ("CMYK", 3)]
)
def test_images_of_pil(mode, channels):
    assert stage_image("it", pillow(mode)).wait().shape == (2, 3, channels)


NO_IMAGES = {
    "HWC as a tensor": torch.ones(20, 20, 3),
    "a batch": torch.ones(8, 3, 2, 2),
    "sparse": torch.ones(2, 3).to_sparse(),
    "a number": torch.tensor(1.0),
    "two channels": torch.ones(2, 9, 9),
    "numpy CHW": np.ones((3, 20, 20)),
    "complex": torch.ones(2, 3, dtype=torch.complex64),
    "objects": np.array([[None]]),
    "texts": np.array([["a"]]),
    "a path": "out.png",
    "nothing": None,
    "a list": [[0, 1]],
    "empty": torch.ones(0, 4),
    "too large": torch.ones(MAX_SIDE + 1, 1, dtype=torch.uint8),
}


@pytest.mark.parametrize("name", NO_IMAGES)
def test_what_is_no_image_is_refused(attempt, name):
    own = recorder(attempt)
    with pytest.raises(UsageError) as error:
        own.image("sample", NO_IMAGES[name])
    said(error.value.render())
    own.close()
    assert not index_file(attempt.run).exists()


def test_a_png_has_the_pixels():
    for channels in (1, 3, 4):
        pixels = np.arange(5 * 7 * channels, dtype=np.uint8).reshape(5, 7, channels)
        png = encode_png(pixels.tobytes(), 7, 5, channels)
        assert (decoded(png) == pixels).all()


def test_a_png_is_read_by_other_programs():
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert (np.asarray(image.open(BytesIO(encode_png(pixels.tobytes(), 7, 5, 3)))) == pixels).all()


HISTOGRAMS = {
    # Maps a name to values, ends, counts by bin, and the number of values that are not finite.
    "two ends": ([0.0, 1.0], (0, 1), {0: 1, NUM_BINS - 1: 1}, 0),
    "equal values": ([3.0] * 5, (3, 3), {0: 5}, 0),
    "one": (torch.tensor(2), (2, 2), {0: 1}, 0),
    "nan and inf": (torch.tensor([0.0, math.nan, 1.0, math.inf, -math.inf]), (0, 1), {0: 1, 63: 1}, 3),
    "negative": (np.array([-4.0, -2.0]), (-4, -2), {0: 1, 63: 1}, 0),
    "bool": (torch.tensor([True, False, True]), (0, 1), {0: 1, 63: 2}, 0),
    "bf16": (torch.tensor([0.0, 0.5], dtype=torch.bfloat16), (0, 0.5), {0: 1, 63: 1}, 0),
    "whole": (torch.tensor([[0, 2**40]]), (0, 2**40), {0: 1, 63: 1}, 0),
    "gradient": (torch.zeros(3, requires_grad=True), (0, 0), {0: 3}, 0),
    "mixed list": ([1, 2.5], (1, 2.5), {0: 1, 63: 1}, 0),
}


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_a_histogram(name):
    values, ends, expected, num_other = HISTOGRAMS[name]
    low, high, total, square_sum, other, *counts = stage_histogram("it", values).wait().tolist()
    assert ((low, high), other) == (ends, num_other)
    assert {index: count for index, count in enumerate(counts) if count} == expected
    kept = [
        float(x)
        for x in torch.as_tensor(np.asarray(torch.as_tensor(values).detach().double())).flatten()
        if abs(x) < float("inf")
    ]
    assert (total, square_sum) == (sum(kept), sum(x * x for x in kept))


@pytest.mark.parametrize(
    "values", [[], torch.ones(0), ["a"], None, object(), torch.ones(2, dtype=torch.complex64), [[1], [1, 2]]]
)
def test_what_has_no_histogram(attempt, values):
    with pytest.raises(UsageError, match=r"histogram 'x' (has|does not contain)"):
        recorder(attempt).histogram("x", values)


def test_no_value_is_finite(attempt):
    own = recorder(attempt, 3)
    own.histogram("x", [float("nan")] * 2)
    own.close()
    [item] = read_items(attempt.run)
    assert (item.values["low"], item.count("not_finite"), sum(item.counts)) == (None, 2, 0)
    assert "no value is" in render(attempt.run, [item])


def test_files_and_their_index(attempt):
    own = recorder(attempt, 5)
    own.image("train/sample ü", torch.ones(3, 2, 2), caption="a <b>")
    own.histogram("weights", torch.arange(10.0))
    own.text("out", "Hello\nworld")
    own.close()
    image, histogram, text = read_items(attempt.run)
    assert [item.step for item in (image, histogram, text)] == [5, 5, 5]
    assert (image.name, image.kind, image.text("caption")) == ("train/sample ü", "image", "a <b>")
    assert (decoded(read_image(attempt.run, image)) == 255).all()
    assert image_file(attempt.run, image).stat().st_mode & 0o077 == 0
    assert (histogram.number("low"), histogram.number("high"), sum(histogram.counts)) == (0, 9, 10)
    assert text.text("text") == "Hello\nworld"


def test_a_checkpoint_waits_for_the_items_that_were_logged_before_it(attempt, monkeypatch):
    gates = {"early": Event(), "late": Event()}
    own = recorder(attempt)
    own.written()()
    index = own._index

    def slow_index(name, *values):
        assert gates[name].wait(60)
        index(name, *values)

    monkeypatch.setattr(own, "_index", slow_index)
    own.text("early", "x")
    wait = own.written()
    own.text("late", "x")
    Timer(0.1, gates["early"].set).start()
    wait()
    assert [item.name for item in read_items(attempt.run)] == ["early"]
    gates["late"].set()
    own.close()
    wait()


def test_an_image_is_as_it_was_when_it_was_logged(attempt):
    own, image, array = recorder(attempt), torch.zeros(1, 2, 2, dtype=torch.uint8), np.zeros((2, 2), np.uint8)
    own.image("tensor", image)
    own.image("array", array)
    image += 9
    array += 9
    own.close()
    assert [decoded(read_image(attempt.run, item)).max() for item in read_items(attempt.run)] == [0, 0]


def test_of_a_name_the_first_of_a_step_counts(attempt):
    own = recorder(attempt, 1)
    for text in ("first", "second"):
        own.text("out", text)
    own.text("out", "later", step=2)
    own.close()
    texts = [(item.step, item.text("text")) for item in read_items(attempt.run)]
    assert texts == [(1, "first"), (2, "later")]


def test_in_the_validation_names_begin_with_val(attempt):
    own = recorder(attempt, 4, "evaluate")
    own.text("out", "x")
    own.close()
    assert [item.name for item in read_items(attempt.run)] == ["val_out"]


@pytest.mark.parametrize(
    ("message", "name", "text", "step"),
    [
        *(
            ("invalid name", name, "x", 1)
            for name in ("", "a" * 129, "two\nlines", "\x1b[31m", None, 3, b"x")
        ),
        *(("invalid step", "x", "y", step) for step in (-1, 1.5, "3", True)),
        *(("must be a str", "x", text, 1) for text in (None, 3, b"x", ["a"])),
    ],
)
def test_what_is_no_name_step_or_text(attempt, message, name, text, step):
    with pytest.raises(UsageError, match=message):
        recorder(attempt).text(name, text, step)


def test_names_that_differ_in_a_slash_have_files_of_their_own(attempt):
    own = recorder(attempt)
    for name in ("a/b", "a_b", "../../a", ".", "ä" * 100):
        own.image(name, torch.ones(2, 2))
    own.close()
    files = [image_file(attempt.run, item) for item in read_items(attempt.run)]
    assert len({*files}) == 5
    assert {file.parent for file in files} == {media_dir(attempt.run)}


def test_a_resume_replaces_later_steps(attempt):
    run = attempt.run
    for number, steps in ((1, (10, 20, 30)), (2, (20, 25)), (3, (25,))):
        for step in steps:
            append_jsonl(index_file(run), {"step": step, "attempt": number, "name": "out", "kind": "text"})
        append_jsonl(index_file(run), {"step": 0, "attempt": number, "name": "before", "kind": "text"})
    places = [(item.step, item.name, item.attempt) for item in read_items(run)]
    assert places == [(0, "before", 3), (10, "out", 1), (20, "out", 2), (25, "out", 3)]


def test_damaged_lines_are_skipped(attempt):
    run = attempt.run
    good = {"step": 1, "attempt": 1, "name": "out", "kind": "text", "text": "good"}
    lines = [
        json.dumps(good),
        "not json",
        "[]",
        '{"step": 1}',
        '{"step": "1", "name": "x", "kind": "text"}',
        '{"step": 2, "name": 3, "kind": "text"}',
        '{"step": 2, "name": "x", "kind": "video"}',
        '{"step": 3, "name": "h", "kind": "histogram", "low": 0, "high": 1, "counts": '
        '["a", null, 1e999, -4]}',
        '{"step": 4, "name": "i", "kind": "image", "width": "wide"}',
        '{"step": 5, "name": "cut", "ki',
    ]
    index_file(run).write_text("\n".join(lines))
    items = read_items(run)
    assert [item.name for item in items] == ["out", "h", "i"]
    assert items[1].counts == [0, 0, 0, 0]
    assert "image is missing" in render(run, items)
    assert [entry["name"] for entry in summary(items)] == ["out", "h", "i"]


@pytest.mark.parametrize(
    "file", ["../secret.png", "/etc/passwd", "a/b.png", "..", ".", "", "link.png", "text.png", None, 3]
)
def test_a_page_shows_no_file_from_elsewhere(attempt, file):
    run = attempt.run
    media_dir(run).mkdir()
    secret = encode_png(b"\1", 1, 1, 1)
    (run.path / "secret.png").write_bytes(secret)
    (media_dir(run) / "link.png").symlink_to(run.path / "secret.png")
    (media_dir(run) / "text.png").write_text("secret")
    append_jsonl(index_file(run), {"step": 1, "name": "x", "kind": "image", "file": file})
    [item] = read_items(run)
    assert read_image(run, item) is None
    assert "base64" not in render(run, [item])


def test_a_run_keeps_no_more_than_its_bounds(attempt, monkeypatch, caplog):
    monkeypatch.setattr(recorder_module, "MAX_ITEMS", 3)
    append_jsonl(index_file(attempt.run), {"step": 1, "attempt": 1, "name": "a", "kind": "text", "text": "x"})
    own = recorder(attempt)
    for step in range(2, 9):
        own.text("a", "x", step)
    own.close()
    assert [item.step for item in read_items(attempt.run)] == [1, 2, 3]
    [problem] = [event.reason for event in read_events(attempt.run, "media")]
    said(problem)
    assert caplog.messages == [problem]


def test_texts_count_in_the_bytes_of_a_run(attempt, monkeypatch):
    monkeypatch.setattr(recorder_module, "MAX_BYTES", 10)
    for step, expected in ((1, [1]), (2, [1, 2]), (3, [1, 2])):
        own = recorder(attempt)
        own.text("a", "xéé", step)
        own.close()
        assert [item.step for item in read_items(attempt.run)] == expected


def test_a_disk_that_cannot_be_written_ends_no_training(attempt, caplog):
    media_dir(attempt.run).write_text("a file")
    own = recorder(attempt)
    for step in (1, 2):
        own.image("a", torch.ones(2, 2), step)
        own.text("b", "still", step)
    own.close()
    assert len([line for line in caplog.messages if "cannot write images" in line]) == 1
    assert [item.name for item in read_items(attempt.run)] == ["b", "b"]


def test_long_texts_are_cut(attempt):
    own = recorder(attempt)
    own.text("a", "x" * 100_000)
    own.image("b", torch.ones(2, 2), caption="y" * 2_000)
    own.close()
    text, image = read_items(attempt.run)
    assert text.text("text").endswith("x… (34,464 more characters)")
    assert image.text("caption").endswith("y… (1,000 more characters)")


def test_the_report_shows_the_newest_of_each_name_and_escapes(attempt):
    own = recorder(attempt)
    for step in range(1, 8):
        own.image("<i>", torch.rand(3, 4, 4), step, caption="<script>")
        own.text("out & in", "<b>bold</b>", step)
    own.histogram("h", torch.randn(100))
    own.close()
    history = RunHistory(attempt.run)
    [(title, page)] = load("media").sections(history).items()
    assert title == "Images, histograms and texts"
    assert page.count("data:image/png;base64,") == 4
    for raw in ("<i>", "<script>", "<b>bold"):
        assert raw not in page
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "3 earlier</summary><p>steps 1, 2, 3</p>" in page
    assert page.count("<svg") == 1
    found = {own["kind"]: own for own in load("media").report(history)["media"]}
    image, histogram, text = (found[kind] for kind in ("image", "histogram", "text"))
    assert (image["name"], image["steps"], text["last"]["text"]) == ("<i>", [*range(1, 8)], "<b>bold</b>")
    assert histogram["kind"] == "histogram"


def test_a_run_without_any_has_no_section(attempt):
    history = RunHistory(attempt.run)
    assert (load("media").sections(history), load("media").report(history)) == ({}, {})


def test_a_page_with_many_names_and_large_images_is_bounded(attempt):
    run, noise = attempt.run, np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), dtype=np.uint8)
    own = recorder(attempt)
    for index in range(4):
        own.image(f"large {index}", noise)
    for index in range(40):
        own.text(f"name {index}", "x")
    own.close()
    page = render(run, read_items(run))
    assert len(page) < 30_000_000
    assert page.count("base64") == 2
    assert "12 more names" in page


def test_a_value_on_a_gpu_is_copied_without_a_wait(monkeypatch):
    done = []

    class Event:
        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("wait")

    class OnGpu:
        device, shape, dtype = torch.device("cuda"), (2,), torch.uint8

    class Host:
        def copy_(self, tensor: object, *, non_blocking: bool) -> None:
            done.append(("copy", isinstance(tensor, OnGpu), non_blocking))

    monkeypatch.setattr(torch, "empty", lambda shape, *, dtype, pin_memory: Host() if pin_memory else None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    staged = staging._stage(OnGpu())
    assert done == [("copy", True, True), "record"]
    assert isinstance(staged.wait(), Host)
    assert done[2:] == ["wait"]
