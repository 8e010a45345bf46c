"""First weights are the same on any layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.models import SEQ_LEN, nano, nano_shape
from tests.support.runs import run_ranks
from trainkit.plan.launch import Layout
from trainkit.trainer.build import init_parameters
from trainkit.trainer.distributed import World
from trainkit.trainer.models.decoder import Decoder
from trainkit.trainer.models.model import local_tensor
from trainkit.trainer.parallel.data_parallel import apply_data_parallel


def test_a_seed_and_a_name_decide() -> None:
    first, again, other = nano(seed=3), nano(seed=3), nano(seed=4)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == ("norm" in name)
    assert not torch.equal(first.blocks[0].ffn.up.weight, first.blocks[1].ffn.up.weight)
    assert not torch.equal(first.blocks[0].ffn.up.weight, first.blocks[0].ffn.gate.weight)


def test_torch_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    model = nano()
    state = torch.get_rng_state()
    init_parameters(model, 1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(before)


def check_shards(world: World, whole: dict[str, torch.Tensor], layout: Layout) -> None:
    mesh = world.mesh
    assert mesh is not None
    if layout.dp_replicate > 1:
        mesh = torch.distributed.init_device_mesh(
            "cpu", (layout.dp_replicate, layout.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
        )
    with torch.device("meta"):
        model = Decoder(nano_shape(num_heads=3, num_kv_heads=1, dim=66), SEQ_LEN)
    apply_data_parallel(model, mesh, layout, torch.float32)
    model.to_empty(device="cpu")
    model.rebuild_buffers()
    init_parameters(model, 0)
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), whole[name]), name
        if layout.dp_shard > 1:
            assert local_tensor(param).numel() < whole[name].numel()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(1, 2), Layout(2, 1), Layout(1, 3)])
def test_every_layout_begins_with_the_same_values(tmp_path: Path, layout: Layout) -> None:
    """Rows that the ranks cannot share evenly included."""
    whole = {n: p.detach() for n, p in nano(num_heads=3, num_kv_heads=1, dim=66).named_parameters()}
    run_ranks(check_shards, layout.dp, whole, layout)
