"""An architecture is one file: what it says of itself is enough for every layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.support import gpt
from tests.support.models import SEQ_LEN, nano_shape
from tests.support.parity import Case, run_cases, worst_difference
from tests.support.runs import run_ranks
from trainkit.errors import EXIT_NO_RESTART, TrainkitError
from trainkit.rundir import RunDir, write_json
from trainkit.trainer.distributed import World
from trainkit.trainer.models import load_architecture
from trainkit.trainer.models.model import Role
from trainkit.trainer.parallel.tensor import apply_tensor_parallel

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
        load_architecture(name)
    assert error.value.exit_code == EXIT_NO_RESTART


def test_a_run_has_the_code_that_it_was_submitted_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, project, code = RunDir(tmp_path / "run"), tmp_path / "project", tmp_path / "run" / "code"
    for folder in (project / "sub", code / "sub"):
        folder.mkdir(parents=True)
        shutil.copy(FILE, folder.parent / "gpt.py")
    shutil.copy(FILE, tmp_path / "elsewhere.py")
    write_json(run.job_file, {"code": {"code": str(code), "workdir": str(code / "sub")}})
    monkeypatch.chdir(project / "sub")
    (project / "gpt.py").write_text("")  # edited since
    assert load_architecture("../gpt.py:Gpt", run).__name__ == "Gpt"
    assert load_architecture(f"{tmp_path}/project/gpt.py:Gpt", run).__name__ == "Gpt"
    assert load_architecture("../../elsewhere.py:Gpt", run).__name__ == "Gpt", "the copy does not hold it"
    with pytest.raises(TrainkitError, match="has no class Gpt"):
        load_architecture("../gpt.py:Gpt")


class Forgetful(gpt.Gpt):
    """Does not say what becomes of the embedding of positions."""

    TENSOR_PLAN: ClassVar[dict[str, Role]] = {
        name: role for name, role in gpt.Gpt.TENSOR_PLAN.items() if name != "places"
    }


def refuse_a_gap(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    with torch.device("meta"):
        model = Forgetful(nano_shape(), SEQ_LEN)
    with pytest.raises(TrainkitError, match="TENSOR_PLAN of Forgetful does not name `places`"):
        apply_tensor_parallel(model, model.TENSOR_PLAN, mesh, sequence_parallel=True, loss_parallel=True)


@pytest.mark.slow
def test_a_plan_with_a_gap_is_refused() -> None:
    run_ranks(refuse_a_gap, 2)


def test_ours() -> None:
    assert load_architecture("llama").__name__ == "Decoder"
