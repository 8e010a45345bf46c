"""Memory by the names that drivers and clusters give, and the releases of torch."""

from __future__ import annotations

import pytest

from trainkit.formats import GIB, MIB, gib
from trainkit.plan.gpus import find_gpu, known_gpus, release_problem


@pytest.mark.parametrize(
    ("name", "called", "mib"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 80GB", 81_559),
        ("h100", "H100 80GB", 81_559),
        ("nvidia_h100_80gb_hbm3", "H100 80GB", 81_559),
        ("NVIDIA H100 PCIe", "H100 PCIe", 81_559),
        ("NVIDIA H100 NVL", "H100 NVL", 95_830),
        ("h100-94gb", "H100 94GB", 95_830),
        ("NVIDIA H200", "H200", 143_771),
        ("NVIDIA B200", "B200", 183_359),
        ("NVIDIA GB200", "GB200", 189_471),
        ("NVIDIA GH200 480GB", "GH200 96GB", 97_871),  # 480 GB is what its CPU has
        ("NVIDIA GH200 144G HBM3e", "GH200 144GB", 146_831),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", 81_920),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 40_960),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB", 40_960),
        ("a100_40", "A100 40GB", 40_960),
        ("a100", "A100 80GB", 81_920),
        ("Tesla V100-SXM2-16GB", "V100 16GB", 16_384),
        ("NVIDIA L40S", "L40S", 46_068),
        ("NVIDIA L4", "L4", 23_034),
        ("NVIDIA A10G", "A10G", 23_028),
        ("NVIDIA A10", "A10", 23_028),
        ("Tesla T4", "T4", 15_360),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 24_564),
        ("rtx4090", "RTX 4090", 24_564),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 49_140),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000", 97_887),
    ],
)
def test_gpu(name: str, called: str, mib: int) -> None:
    gpu = find_gpu(name)
    assert gpu is not None
    assert (gpu.name, gpu.memory) == (called, mib * MIB)
    assert gpu.usable < gpu.memory <= gpu.most_memory


@pytest.mark.parametrize(
    "name", ["gpu", "", "NVIDIA Something New", "MIG device", "1g.10gb", "h1000", "mi300x"]
)
def test_others_are_not_known(name: str) -> None:
    assert find_gpu(name) is None


def test_a_name_for_several_sizes() -> None:
    """A plan takes the commonest, a refusal goes by the largest."""
    a100, h100 = find_gpu("a100"), find_gpu("h100")
    assert a100 is not None
    assert h100 is not None
    assert a100.most_memory == 80 * GIB
    assert (h100.memory, h100.most_memory) == (81_559 * MIB, 95_830 * MIB)
    exact = find_gpu("h100-80gb")
    assert exact is not None
    assert exact.most_memory == exact.memory


def test_every_name_that_is_offered_is_known() -> None:
    assert all(find_gpu(name) for name in known_gpus())


def test_words() -> None:
    assert gib(1.5 * GIB) == "1.5 GiB"


@pytest.mark.parametrize(
    "version", ["2.11.0", "2.11.0+cu130", "2.11.0a0+git1a2b3c", "2.13.0", "3.0", "", "git"]
)
def test_releases_that_the_trainer_supports(version: str) -> None:
    assert release_problem(version) is None


@pytest.mark.parametrize("version", ["1.13.1", "2.2.0+cu121", "2.10.0"])
def test_older_ones_are_refused_by_name(version: str) -> None:
    problem = release_problem(version)
    assert problem is not None
    assert problem[0] == f"has torch {version}, and the trainer requires torch 2.11 or newer"
    assert "pip install 'torch>=2.11'" in problem[1]
