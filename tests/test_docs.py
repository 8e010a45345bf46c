"""The README's commands, run as they stand, in a folder that has what the README speaks of."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tools.slurm_cluster.cluster import Cluster

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORT = {
    "TRAINKIT_MODEL__PRESET": "nano",
    "TRAINKIT_DATA__SEQ_LEN": "32",
    "TRAINKIT_TRAIN__EVAL_BATCHES": "1",
    "TRAINKIT_LOGGING__TENSORBOARD": "false",
}
"""Laid over the configs by the environment: a training takes seconds, the commands stay as they are."""
LONGER = {"TRAINKIT_TRAIN__GLOBAL_BATCH_SIZE": "128"}
"""Longer steps, for a drill: its strike takes its time to arrive."""


def blocks(kind: str) -> list[str]:
    """The fenced blocks of one kind; every second fence closes one."""
    parts = re.split(r"^```(.*)\n", README, flags=re.MULTILINE)
    return [text for fence, text in zip(parts[1::4], parts[2::4], strict=True) if fence == kind]


def commands(kind: str = "console") -> list[str]:
    """Every line of a console block that starts trainkit, without its comment."""
    lines = [line for block in blocks(kind) for line in block.splitlines()]
    starts = ("$ trainkit", "$ srun")
    return [line[2:].split("    #")[0].strip() for line in lines if line.startswith(starts)]


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "configs", folder / "configs")
    text = "".join(f"line {number} says {number * number}\n" for number in range(4000))
    (folder / "mytext.txt").write_text(text)
    (folder / "corpus").mkdir()
    (folder / "corpus" / "one.txt").write_text(text)
    (folder / "corpus" / "two.jsonl").write_text('{"text": "a row of its own"}\n' * 400)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"])
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "mine.yaml").write_text(next(block for block in blocks("yaml") if "name: mine" in block))
    return folder


@pytest.mark.slow
def test_every_slurm_command_works(sandbox: Path, cluster: Cluster) -> None:
    (sandbox / "train.py").write_text("import os\nprint(os.environ['RANK'])\n")
    found = [command for command in commands("console slurm") if not command.startswith("trainkit shell")]
    assert len(found) >= 5
    # The GPUs of the cluster are not real.
    short = {**SHORT, "TRAINKIT_DEVICE": "cpu", "TRAINKIT_TRAIN__STEPS": "3"}
    for command in found:
        done = run(command, sandbox, **{**cluster.environ, **short})
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def run(command: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    home = {"XDG_STATE_HOME": str(folder / "state"), "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, **home, **environ},
        capture_output=True,
        text=True,
        timeout=1200,
    )


@pytest.mark.slow
def test_every_command_works_in_the_order_of_the_text(sandbox: Path) -> None:
    found = commands()
    assert len(found) >= 10
    for command in found:
        for _ in range(3):
            done = run(command, sandbox, **SHORT, **(LONGER if "drill" in command else {}))
            if "give it more steps" not in done.stdout:  # it says so where it came too late
                break
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_error_that_is_shown_is_the_one_that_comes(sandbox: Path) -> None:
    shown = next(block for block in blocks("") if block.startswith("error: "))
    done = run("trainkit check configs/wrong.yaml --nodes 2", _with_wrong_config(sandbox))
    assert done.returncode == 2
    assert done.stderr.split() == shown.split()


def test_the_plan_that_is_shown_is_the_one_that_comes(sandbox: Path) -> None:
    [command] = [command for command in commands() if command.startswith("trainkit plan")]
    done = run(f"{command} 2>&1", sandbox)
    shown = next(block for block in blocks("") if "recommended: " in block)
    for shortened, line in zip(shown.splitlines(), done.stdout.splitlines(), strict=True):
        start, _, end = shortened.partition("...")
        assert line.startswith(start.rstrip())
        assert line.endswith(end)


def _with_wrong_config(folder: Path) -> Path:
    text = (folder / "configs" / "quickstart.yaml").read_text()
    (folder / "configs" / "wrong.yaml").write_text(
        text.replace("global_batch_size: 32", "global_batch_size: 30")
    )
    return folder


def test_every_command_of_the_table_exists() -> None:
    from trainkit.cli.main import COMMANDS

    table = README[README.index("## Commands") : README.index("## A run is a folder")]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = {word for row in rows for word in re.findall(r"`(?:trainkit )?([a-z]+)", row)}
    assert named <= set(COMMANDS)
    assert set(COMMANDS) - named <= {"check", "schema", "completion"}
