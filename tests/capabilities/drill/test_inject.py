import random
from pathlib import Path

from tests.support.said import said
from trainkit.capabilities.drill.inject import flip_bytes
from trainkit.run.files import write_json
from trainkit.run.manifest import MANIFEST_NAME, SEAL, file_hash, find_damage, published, seal
from trainkit.run.rundir import RunDir


def save(run: RunDir, step: int) -> None:
    """Write a checkpoint with one small and one large file."""
    folder = run.checkpoint_dir(step)
    folder.mkdir(parents=True)
    for name, size in (("small", 10), ("large", 10_000)):
        (folder / name).write_bytes(bytes(range(10)) * (size // 10))
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": file_hash(folder / name)}
        for name in ("large", "small")
    }
    manifest = {"version": 1, "step": step, "files": files}
    write_json(folder / MANIFEST_NAME, {**manifest, SEAL: seal(manifest)})


def test_flipped_bytes_are_found_only_by_the_hash(tmp_path: Path):
    run = RunDir(tmp_path)
    save(run, 5)
    save(run, 10)
    before = (run.checkpoint_dir(10) / "large").read_bytes()
    damaged = flip_bytes(run, random.Random(0))
    after = (run.checkpoint_dir(10) / "large").read_bytes()
    assert damaged.step == 10
    assert len(after) == len(before)
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 8
    intact, damage = [find_damage(checkpoint) for checkpoint in published(run.checkpoints_dir)]
    assert intact == ""
    said(damage)
