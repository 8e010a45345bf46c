"""Tests GPU types: their names, the type of a run, and their peak speed."""

from pathlib import Path

import pytest

from tests.support.said import said
from trainkit.capabilities.layouts.choices import find_hardware
from trainkit.cluster.machine import Machine
from trainkit.cluster.model import Cluster, NodeKind, Partition
from trainkit.cluster.target import LOCAL, Target
from trainkit.config import load_config
from trainkit.config.schema import RunConfig
from trainkit.errors import UsageError
from trainkit.formats import GIB, MIB
from trainkit.plan.gpus import find_gpu, gpu_names, known_gpu, known_gpus, peak_flops
from trainkit.plan.torch_build import release_problem


@pytest.mark.parametrize(
    ("name", "called", "mib", "peak"),
    [
        *(("NVIDIA H100 80GB HBM3", "H100 80GB", 81_559, 989e12), ("h100", "H100 80GB", 81_559, 989e12)),
        ("nvidia_h100_80gb_hbm3", "H100 80GB", 81_559, 989e12),
        ("NVIDIA H100 PCIe", "H100 PCIe", 81_559, 756e12),
        *(("NVIDIA H100 NVL", "H100 NVL", 95_830, 835.5e12), ("h100-94gb", "H100 94GB", 95_830, 989e12)),
        *(("NVIDIA H200", "H200", 143_771, 989e12), ("NVIDIA H20", "H20 96GB", 97_871, 148e12)),
        *(("NVIDIA B200", "B200", 183_359, 2.25e15), ("NVIDIA GB200", "GB200", 189_471, 2.5e15)),
        *(("NVIDIA B300 SXM6 AC", "B300", 275_040, 2.25e15), ("NVIDIA GB300", "GB300", 275_040, 2.5e15)),
        ("NVIDIA GH200 480GB", "GH200 96GB", 97_871, 989e12),  # 480 GB is the memory of its CPU
        ("NVIDIA GH200 144G HBM3e", "GH200 144GB", 146_831, 989e12),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", 81_920, 312e12),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 40_960, 312e12),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB", 40_960, 312e12),
        *(("a100_40", "A100 40GB", 40_960, 312e12), ("a100", "A100 80GB", 81_920, 312e12)),
        *(("Tesla V100-SXM2-16GB", "V100 16GB", 16_384, 125e12), ("NVIDIA L40S", "L40S", 46_068, 362e12)),
        *(("NVIDIA L40", "L40", 46_068, 181e12), ("NVIDIA L4", "L4", 23_034, 121e12)),
        *(("NVIDIA A10G", "A10G", 23_028, 70e12), ("NVIDIA A10", "A10", 23_028, 125e12)),
        *(("Tesla T4", "T4", 15_360, 65e12), ("NVIDIA GeForce RTX 4090", "RTX 4090", 24_564, 165.2e12)),
        ("rtx4090", "RTX 4090", 24_564, 165.2e12),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 49_140, 364.2e12),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000", 97_887, None),
        ("NVIDIA RTX A6000", "RTX A6000", 49_140, 154.8e12),
    ],
)
def test_gpu(name, called, mib, peak):
    gpu = find_gpu(name)
    assert (gpu.name, gpu.memory) == (called, mib * MIB)
    assert gpu.usable < gpu.memory <= gpu.most_memory
    bf16 = None if called in ("V100 16GB", "T4") else peak
    assert [peak_flops(name, dtype) for dtype in ("bf16", "fp16", "fp32")] == [bf16, peak, None]


OTHERS = ("gpu", "", "NVIDIA Something New", "MIG device", "1g.10gb", "h1000", "mi300x", "cpu")


def test_others_are_not_known():
    for name in (*OTHERS, "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert find_gpu(name) is peak_flops(name, "fp16") is None


def test_a_name_for_several_sizes():
    """A plan assumes the most common size. A refusal assumes the largest."""
    h100, exact = find_gpu("h100"), find_gpu("h100-80gb")
    assert find_gpu("a100").most_memory == 80 * GIB
    assert (h100.memory, h100.most_memory) == (81_559 * MIB, 95_830 * MIB)
    assert exact.most_memory == exact.memory
    assert all(find_gpu(name) for name in known_gpus())


def test_releases_that_the_trainer_supports():
    supported = "2.11.0 2.11.0+cu130 2.11.0a0+git1a2b3c 2.13.0 3.0 git"
    assert {release_problem(version) for version in ["", *supported.split()]} == {None}
    said("\n".join("\n".join(release_problem(old)) for old in ("1.13.1", "2.2.0+cu121", "2.10.0")))


NO_GPU = Machine(2, 0, (), "there is no NVIDIA driver on this machine")
TWO_GPUS = Machine(16, 2, ("NVIDIA GeForce RTX 4090",) * 2, "this machine has 2 x NVIDIA GeForce RTX 4090")
PARTITIONS = (
    Partition("gpu", is_default=True, nodes=(NodeKind(4, gpus={"h100": 4}), NodeKind(8, gpus={"a100": 8}))),
    Partition("one", nodes=(NodeKind(4, gpus={"a100": 4}), NodeKind(9, cpus=64))),
    Partition("nameless", nodes=(NodeKind(2, gpus={"": 4}),)),
)
CLUSTER = Target("sbatch", "", Cluster("big", partitions=PARTITIONS))


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    return load_config(None, overrides=overrides, environ={}, cwd=tmp_path).config


@pytest.mark.parametrize(
    ("resources", "where", "typed", "found"),
    [
        *(("", LOCAL, ("h100", 8), ("H100 80GB", 8, 8)), ("", LOCAL, ("h100", 4), ("H100 80GB", 4, 4))),
        *(("", LOCAL, ("h100", 64), ("H100 80GB", 64, 8)), ("", LOCAL, ("gb200", 64), ("GB200", 64, 4))),
        ("", LOCAL, ("h100", None), ("H100 80GB", 8, 8)),
        ("nodes=2 gpus_per_node=4", LOCAL, ("h100", None), ("H100 80GB", 8, 4)),
        ("gpu_type=a100_40", LOCAL, (None, 8), ("A100 40GB", 8, 8)),
        ("gpus_per_node=4", LOCAL, ("h100", 16), ("H100 80GB", 16, 4)),
        ("", TWO_GPUS, (None, None), ("RTX 4090", 2, 2)),
        ("partition=one nodes=3", CLUSTER, (None, None), ("A100 80GB", 12, 4)),
        ("gpu_type=a100", CLUSTER, (None, None), ("A100 80GB", 8, 8)),
        ("", CLUSTER, (None, None), ("H100 80GB", 8, 8)),
    ],
)
def test_hardware(resources, where, typed, found, tmp_path):
    machine, target = (where, LOCAL) if where is TWO_GPUS else (NO_GPU, where)
    loaded = config(tmp_path, *(f"resources.{one}" for one in resources.split()))
    result = find_hardware(loaded, machine, target, *typed)
    assert (result.gpu.name, result.num_gpus, result.node_size) == found
    assert result.num_nodes * result.node_size == result.num_gpus


def test_a_gpu_without_a_type_is_refused(tmp_path):
    nameless = config(tmp_path, "resources.partition=nameless")
    with pytest.raises(UsageError) as error:
        find_hardware(nameless, NO_GPU, CLUSTER, None, None)
    said(error.value.message)
    assert error.value.hint


def test_of_several_types_the_largest_counts(tmp_path):
    names = gpu_names(config(tmp_path), NO_GPU, CLUSTER)
    assert names == ["h100", "a100"]
    assert known_gpu(names).name == "H100 80GB"
    assert known_gpu(["h100", "something"]) is known_gpu([]) is None
