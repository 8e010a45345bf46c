"""What a layout asks of a model and of a batch, said with what would do."""

from __future__ import annotations

import pytest

from trainkit.config.running import ParallelConfig
from trainkit.config.training import ModelConfig
from trainkit.errors import ConfigError
from trainkit.plan.launch import Layout
from trainkit.plan.layouts.rules import layout_problems, make_layout
from trainkit.plan.model_shape import resolve_model_shape


def problems(
    device_batch_size: int = 8,
    seq_len: int = 64,
    num_layers: int = 8,
    accumulation_steps: int = 1,
    **parallel: object,
) -> list[str]:
    section = ParallelConfig.model_validate(parallel)
    shape = resolve_model_shape(ModelConfig(preset="nano", num_layers=num_layers), 257)
    layout = Layout(tp=section.tp, pp=section.pp, cp=section.cp)
    found = layout_problems(layout, section, shape, device_batch_size, seq_len, accumulation_steps)
    return [f"{item.key} {item.message}; {item.hint}" for item in found]


@pytest.mark.parametrize(
    "parallel",
    [
        {"tp": 2},
        {"cp": 4},
        {"pp": 4, "pp_microbatches": 4},
        {"pp": 4, "pp_schedule": "interleaved_1f1b"},
        {"pp": 8, "accumulation_steps": 2},
        {"pp": 2, "pp_schedule": "dualpipe_v"},
    ],
)
def test_what_fits(parallel: dict[str, object]) -> None:
    assert problems(**parallel) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 4}, "parallel.tp is 4, which does not divide model.num_kv_heads 2; it can be 1 or 2"),
        (
            {"tp": 2, "seq_len": 33},
            "parallel.sequence_parallel is true, but parallel.tp 2 does not divide data.seq_len 33;"
            " false does not shard the sequence",
        ),
        (
            {"cp": 4, "seq_len": 36},
            "parallel.cp is 4, but data.seq_len 36 is not a multiple of 2 x 4; each rank gets two chunks,"
            " one from the start and one from the end, to balance the work",
        ),
        (
            {"pp": 4, "num_layers": 6, "pp_schedule": "zbv"},
            "parallel.pp is 4, which needs 8 stages, but the model has 6 layers;"
            " with zbv it can be at most 3",
        ),
        (
            {"pp": 2, "device_batch_size": 6},
            "parallel.pp_microbatches is 4, which does not divide train.device_batch_size 6;"
            " it can be 1 or 2 or 3 or 6",
        ),
        (
            {"pp": 2, "pp_schedule": "zbv", "activation_checkpointing": "selective"},
            "parallel.activation_checkpointing is selective, which zbv does not support: it splits"
            " the backward pass; use full or none, or one of gpipe, 1f1b and interleaved_1f1b",
        ),
        (
            {"pp": 2, "pp_schedule": "dualpipe_v", "compile": True},
            "parallel.compile is true, which dualpipe_v does not support: it splits the backward pass;"
            " use one of gpipe, 1f1b and interleaved_1f1b",
        ),
        (
            {"pp": 2, "pp_schedule": "interleaved_1f1b", "pp_microbatches": 1, "accumulation_steps": 5},
            "parallel.pp_microbatches is 1 x 5 accumulated, which interleaved_1f1b cannot divide into"
            " 2 equal rounds; use a multiple of parallel.pp 2",
        ),
        (
            {"pp": 8, "num_layers": 8},
            "parallel.pp_microbatches is 4, fewer than the 8 that 1f1b needs with parallel.pp 8;"
            " gpipe works with any number",
        ),
    ],
)
def test_what_does_not(options: dict[str, object], message: str) -> None:
    assert problems(**options) == [message]  # type: ignore[arg-type]


def test_offload_needs_no_other_process() -> None:
    assert problems(offload=True) == []


def test_plain_tensor_parallelism_needs_no_share_of_the_sequence() -> None:
    assert problems(tp=2, seq_len=33, sequence_parallel=False) == []


def test_degrees_that_no_number_of_copies_makes_up_for() -> None:
    with pytest.raises(ConfigError) as error:
        make_layout(ParallelConfig(tp=2, pp=4), 12)
    assert "parallel.tp: is 2: parallel.tp 2 x parallel.pp 4 does not divide 12 processes" in str(error.value)


def test_a_layout_in_words() -> None:
    words = make_layout(ParallelConfig(tp=2, pp=2), 8)[1]
    assert words.startswith(
        "one replica, sharded over 2 groups of 4 processes (2 pipeline-parallel x 2 tensor-parallel)"
    )
