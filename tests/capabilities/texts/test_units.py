"""Tests that cuts between units lose and duplicate no document, wherever they fall."""

import gzip
from collections import Counter

import pytest
from dataset_content import rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainkit.capabilities.texts import units
from trainkit.capabilities.texts.inputs import DatasetSpec, find_inputs
from trainkit.capabilities.texts.units import plan_units

SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def read_all(paths, unit_bytes, val_fraction=0.0):
    """Return every document with its split, joined from the pieces of all units."""
    spec = DatasetSpec(tuple(str(path) for path in paths), val_fraction=val_fraction)
    inputs = find_inputs(spec)
    found, pieces = [], []
    for unit in plan_units(spec, inputs, unit_bytes):
        for reader in unit.readers():
            for piece in reader:
                pieces.append(piece.text)
                if piece.ends_document:
                    found.append((piece.split, b"".join(pieces)))
                    pieces = []
    assert not pieces, "a document without an end"
    return found


texts = st.text(alphabet="aé☃😀\n\r ", max_size=120)


@SETTINGS
@given(texts, st.integers(1, 40), st.integers(1, 16), st.floats(0, 0.9))
def test_text(tmp_path, text, unit_bytes, piece_bytes, val_fraction):
    content = text.encode()
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "PIECE_BYTES", piece_bytes)
        found = read_all([tmp_path / "a.txt"], unit_bytes, val_fraction)
    assert b"".join(document for _, document in found) == content
    assert len(found) <= 2
    for _, document in found:
        document.decode()
    val_bytes = sum(len(document) for split, document in found if split == "val")
    assert val_bytes <= round(len(content) * val_fraction)
    assert found == read_all([tmp_path / "a.txt"], 1 << 20, val_fraction)


@SETTINGS
@given(st.lists(texts, max_size=12), st.integers(1, 60), st.sampled_from([0.0, 0.1, 0.5]))
def test_rows(tmp_path, documents_in, unit_bytes, val_fraction):
    content = "\n".join(rows(text) for text in documents_in)
    (tmp_path / "a.jsonl").write_text(content, encoding="utf-8", newline="")
    found = read_all([tmp_path / "a.jsonl"], unit_bytes, val_fraction)
    assert [document.decode() for _, document in found] == [text for text in documents_in if text]


@SETTINGS
@given(texts, st.floats(0, 0.9))
def test_compressed_text_is_split_like_the_plain_one(tmp_path, text, val_fraction):
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    plain = read_all([tmp_path / "a.txt"], 1 << 20, val_fraction)
    assert read_all([tmp_path / "a.txt.gz"], 1 << 20, val_fraction) == plain


def test_small_files_share_a_unit(tmp_path):
    for number in range(100):
        (tmp_path / f"{number:02d}.txt").write_text("x" * 10)
    spec = DatasetSpec((str(tmp_path),))
    units = plan_units(spec, find_inputs(spec), unit_bytes=95)
    assert len(units) == 12
    assert Counter(part.input for unit in units for part in unit.spans) == Counter(range(100))
    assert sum(unit.num_bytes for unit in units) == 1000


def test_no_row_is_longer_than_its_unit_cares(tmp_path):
    (tmp_path / "a.jsonl").write_text(rows("x" * 3_000_000, "short"))
    found = read_all([tmp_path / "a.jsonl"], unit_bytes=1 << 16)
    assert [len(document) for _, document in found] == [3_000_000, 5]


@pytest.mark.parametrize("name", ["a.txt", "a.parquet"])
def test_planning_reads_little(tmp_path, name):
    with (tmp_path / name).open("wb") as stream:
        # the file is sparse: 20 GiB that take no disk space and a long time to read
        stream.truncate(20 << 30)
    spec = DatasetSpec((str(tmp_path),), val_fraction=0.1)
    assert len(plan_units(spec, find_inputs(spec))) == 20 * 16
