"""An architecture is one file: what it says of itself is enough for every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import gpt
from tests.support.parity import Case, run_cases, worst_difference
from trainkit.errors import EXIT_NO_RESTART, TrainkitError
from trainkit.trainer.models import architecture

FILE = Path(gpt.__file__)
CASES = [
    Case("tp", 2, {"tp": 2}),
    Case("plain-tp", 2, {"tp": 2, "sequence_parallel": False}),
    Case("pp", 2, {"pp": 2, "pp_schedule": "interleaved_1f1b"}),
    Case("cp-shard", 2, {"cp": 2, "activation_checkpointing": "full"}),
]


@pytest.mark.slow
def test_layouts(tmp_path: Path) -> None:
    common = [
        f"model.architecture={FILE}:Gpt",
        "model.tie_embeddings=true",
        "model.dropout=0.1",
        "train.steps=5",
    ]
    run_cases(tmp_path, [Case("alone", 1, {}), *CASES], common)
    found = {case.name: worst_difference(tmp_path / case.name, tmp_path / "alone") for case in CASES}
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:Gpt", "there is no file"),
        (f"{FILE}:Nothing", "has no class Nothing that is a Model"),
        (f"{FILE}:Mlp", "has no class Mlp that is a Model"),
    ],
)
def test_what_is_none(name: str, message: str) -> None:
    with pytest.raises(TrainkitError, match=message) as error:
        architecture(name)
    assert error.value.exit_code == EXIT_NO_RESTART


def test_ours() -> None:
    assert architecture("llama").__name__ == "Decoder"
