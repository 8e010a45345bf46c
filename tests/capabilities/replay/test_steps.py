"""Tests that the samples of a step are the trainer's, on any layout and from any kind of source."""

import gzip
import json
import random
from pathlib import Path

import pytest
import yaml

from trainkit.capabilities.replay.command import one_line
from trainkit.capabilities.replay.steps import find_step, step_samples
from trainkit.config import load_config
from trainkit.data.shards import open_dataset
from trainkit.errors import UsageError
from trainkit.plan.launch import Batch, LaunchPlan, Layout
from trainkit.run.events import log_event
from trainkit.run.rundir import RunDir
from trainkit.trainer.causal_lm import BatchSource

SEQ_LEN = 40
LAYOUTS = (
    Layout(dp_replicate=2, dp_shard=2),
    Layout(dp_shard=2, tp=2, cp=2),
    Layout(dp_replicate=3, pp=2),
)


def write_sources(folder: Path, chance: random.Random) -> dict[str, float]:
    """Write rows, compressed rows, a table and a text, and return them with their weights."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [
        ["".join(chance.choices("ab\n ", k=chance.randrange(1, 150))) for _ in range(60)] for _ in range(3)
    ]
    # Every second line is blank.
    lines = ["".join(json.dumps({"text": text}) + "\n\n" for text in part) for part in texts]
    (folder / "a.jsonl").write_text(lines[0])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[1].encode()))
    parquet.write_table(pyarrow.table({"text": texts[2]}), folder / "c.parquet", row_group_size=7)
    (folder / "d.txt").write_text("".join(chance.choices("abc\n", k=5000)))
    return {str(folder / name): 0.25 for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.txt")}


def document_text(file: str, unit: str, position: int) -> str:
    """Return the text of the document at a position of the file."""
    if unit == "byte":
        return Path(file).read_bytes()[position:].decode()
    if unit == "row":
        from pyarrow import parquet

        return str(parquet.read_table(file)["text"][position - 1])
    data = Path(file).read_bytes()
    rows = (gzip.decompress(data) if file.endswith(".gz") else data).decode().split("\n")
    return str(json.loads(rows[position - 1])["text"])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_samples_are_those_of_the_trainer(tmp_path: Path, layout: Layout) -> None:
    chance = random.Random(str(layout))
    sources = write_sources(tmp_path, chance)
    run = RunDir(tmp_path / "run")
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    size, accumulation = chance.randrange(1, 4), chance.randrange(1, 4)
    batch = Batch(size, accumulation, size * accumulation * layout.dp, 1)
    plan = LaunchPlan("local", 1, layout.world_size, "cpu", layout, batch, 1e-3, 1, 1.0, {})
    attempt.plan_file.write_text(plan.to_text())
    data_values = {"source": sources, "seq_len": SEQ_LEN, "cache_dir": str(tmp_path / "cache")}
    attempt.config_file.write_text(yaml.safe_dump({"name": "t", "train": {"epochs": 2}, "data": data_values}))
    config = load_config(attempt.config_file, layers=False).config
    data = open_dataset(config.data, SEQ_LEN, "train")
    end = 2 * data.num_samples
    total = -(-end // batch.global_batch_size)
    fields = {"step": 0, "total_steps": total, "samples_seen": 0, "num_samples": data.num_samples}
    log_event(run, 1, "training", **fields, data=data.fingerprint)
    units = set()
    for step in (1, 2, total // 2, total):
        at = find_step(run, step)
        samples = step_samples(at)
        assert len(samples) == min(batch.global_batch_size, end - at.start)
        for sample in samples:
            for rank in sample.ranks:
                source = BatchSource(
                    data, batch, layout.dp_rank(rank), layout.dp, config.seed, config.data.shuffle, end
                )
                read = source.steps_at(at.start, 1)[0].microbatches[sample.microbatch].tokens
                row = sample.position - at.start - sample.microbatch * size * layout.dp
                tokens = read[row - layout.dp_rank(rank) * size].tolist()
                texts = "".join(document.text for document in sample.documents).encode()
                assert texts[:SEQ_LEN].startswith(bytes(token for token in tokens if token < 256))
            assert sum(document.num_tokens for document in sample.documents) == SEQ_LEN + 1
            for document in sample.documents:
                whole = document_text(document.file, document.unit, document.position)
                assert whole[document.skipped_tokens :].startswith(document.text)
                units.add(document.unit)
    assert len(units) > 1

    # Other data of the same size has other samples.
    log_event(run, 1, "training", **fields, data="another fingerprint")
    with pytest.raises(UsageError, match="has changed since attempt 1"):
        step_samples(find_step(run, 1))


def test_a_text_is_one_short_line() -> None:
    assert one_line("a\nb\x00\x1b[31m\u202e" + 100 * "é") == "a\\nb\\x00\\x1b[31m\\u202e" + 50 * "é" + "…"
