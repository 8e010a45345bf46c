"""Tests the resources that `trainkit shell` requests from Slurm, and the start-up files of its shell."""

from pathlib import Path

import pytest

from trainkit.capabilities.shell.shell import shell_argv, shell_start_file
from trainkit.config import load_config

SHAPE = ("resources.nodes=2", "resources.gpus_per_node=4", "resources.cpus_per_gpu=3", "device=cpu")


@pytest.mark.parametrize("per", ["gpu", "node"])
def test_a_task_a_gpu_whatever_starts_the_ranks_otherwise(tmp_path: Path, per: str) -> None:
    overrides = [*SHAPE, f"launch.per={per}", "train.global_batch_size=null"]
    argv = shell_argv(load_config(None, overrides=overrides, environ={}, cwd=tmp_path), "start.sh")
    asked = {word for word in argv if word.startswith(("--nodes", "--ntasks", "--cpus"))}
    assert asked == {"--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=3"}


def test_the_shell_is_outside_of_the_container(tmp_path: Path) -> None:
    overrides = ["launch.container=image.sif", "launch.env={A: b}"]
    config = load_config(None, overrides=overrides, environ={}, cwd=tmp_path).config
    text = shell_start_file(config, tmp_path)
    assert "export A=b" in text
    assert "image.sif" not in text
