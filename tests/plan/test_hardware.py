"""Which GPUs a config would run on, from what is said and what is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.cluster.machine import Machine
from trainkit.cluster.model import Cluster, NodeKind, Partition
from trainkit.cluster.target import LOCAL, Target
from trainkit.config import load_config
from trainkit.config.schema import RunConfig
from trainkit.errors import UsageError
from trainkit.plan.hardware import find_hardware, gpu_names, known_gpu

NO_GPU = Machine(2, 0, (), "there is no NVIDIA driver on this machine")
TWO_GPUS = Machine(16, 2, ("NVIDIA GeForce RTX 4090",) * 2, "this machine has 2 x NVIDIA GeForce RTX 4090")
CLUSTER = Target(
    "sbatch",
    "",
    Cluster(
        "big",
        partitions=(
            Partition(
                "gpu", is_default=True, nodes=(NodeKind(4, gpus={"h100": 4}), NodeKind(8, gpus={"a100": 8}))
            ),
            Partition("one", nodes=(NodeKind(4, gpus={"a100": 4}), NodeKind(9, cpus=64))),
            Partition("nameless", nodes=(NodeKind(2, gpus={"": 4}),)),
        ),
    ),
)


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    return load_config(None, overrides=overrides, environ={}, cwd=tmp_path).config


@pytest.mark.parametrize(
    ("overrides", "machine", "target", "typed", "found"),
    [
        ((), NO_GPU, LOCAL, ("h100", 8), ("H100 80GB", 8, 8)),
        ((), NO_GPU, LOCAL, ("h100", 4), ("H100 80GB", 4, 4)),
        ((), NO_GPU, LOCAL, ("h100", 64), ("H100 80GB", 64, 8)),
        ((), NO_GPU, LOCAL, ("gb200", 64), ("GB200", 64, 4)),
        ((), NO_GPU, LOCAL, ("h100", None), ("H100 80GB", 8, 8)),
        (
            ("resources.nodes=2", "resources.gpus_per_node=4"), NO_GPU, LOCAL, ("h100", None),
            ("H100 80GB", 8, 4),
        ),
        (("resources.gpu_type=a100_40",), NO_GPU, LOCAL, (None, 8), ("A100 40GB", 8, 8)),
        (("resources.gpus_per_node=4",), NO_GPU, LOCAL, ("h100", 16), ("H100 80GB", 16, 4)),
        ((), TWO_GPUS, LOCAL, (None, None), ("RTX 4090", 2, 2)),
        (
            ("resources.partition=one", "resources.nodes=3"), NO_GPU, CLUSTER, (None, None),
            ("A100 80GB", 12, 4),
        ),
        (("resources.gpu_type=a100",), NO_GPU, CLUSTER, (None, None), ("A100 80GB", 8, 8)),
        ((), NO_GPU, CLUSTER, (None, None), ("H100 80GB", 8, 8)),
    ],
)  # fmt: skip
def test_hardware(
    overrides: tuple[str, ...],
    machine: Machine,
    target: Target,
    typed: tuple[str | None, int | None],
    found: tuple[str, int, int],
    tmp_path: Path,
) -> None:
    result = find_hardware(config(tmp_path, *overrides), machine, target, *typed)
    assert (result.gpu.name, result.num_gpus, result.node_size) == found
    assert result.num_nodes * result.node_size == result.num_gpus


@pytest.mark.parametrize(
    ("overrides", "target", "typed", "message"),
    [
        ((), LOCAL, (None, 8), "no GPU type to plan for: resources.gpu_type is null"),
        ((), LOCAL, ("zx81", 8), "--gpu-type zx81: unknown GPU type"),
        ((), LOCAL, ("h100", 12), "--gpus 12 is not a multiple of 8 GPUs per node"),
        (
            ("resources.partition=nameless",), CLUSTER, (None, None),
            "unknown GPU type: a GPU without a type",
        ),
    ],
)  # fmt: skip
def test_refused(
    overrides: tuple[str, ...],
    target: Target,
    typed: tuple[str | None, int | None],
    message: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError) as error:
        find_hardware(config(tmp_path, *overrides), NO_GPU, target, *typed)
    assert error.value.message.startswith(message)
    assert error.value.hint


def test_of_several_types_the_largest_counts(tmp_path: Path) -> None:
    names = gpu_names(config(tmp_path), NO_GPU, CLUSTER)
    assert names == ["h100", "a100"]
    largest = known_gpu(names)
    assert largest is not None
    assert largest.name == "H100 80GB"
    assert known_gpu(["h100", "something"]) is None
    assert known_gpu([]) is None
