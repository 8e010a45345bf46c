"""The whole check before a run: layout, data and model shape, all problems at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.cluster.machine import Machine
from trainkit.config import load_config
from trainkit.errors import ConfigError
from trainkit.plan.make_plan import check_config, make_plan

CPU = Machine(2, 0, (), "there is no NVIDIA driver on this machine")


def test_a_good_config_gives_its_plan(tmp_path: Path) -> None:
    loaded = load_config(None, environ={}, cwd=tmp_path)
    assert check_config(loaded, CPU) == make_plan(loaded, CPU)


def test_problems_of_layout_data_and_model_together(tmp_path: Path) -> None:
    overrides = ["train.device_batch_size=5", "train.global_batch_size=32", "model.num_heads=3"]
    overrides.append("data.source=missing.txt")
    loaded = load_config(None, overrides=overrides, environ={}, cwd=tmp_path)
    with pytest.raises(ConfigError) as error:
        check_config(loaded, CPU)
    assert [(problem.key, problem.origin) for problem in error.value.problems] == [
        ("train.global_batch_size", "--set train.global_batch_size=32"),
        ("data.source", "--set data.source=missing.txt"),
        ("model.num_heads", "--set model.num_heads=3"),
        ("model.num_kv_heads", ""),
    ]


def test_float8_where_the_plan_finds_no_gpu(tmp_path: Path) -> None:
    overrides = ["precision.float8=true", "precision.dtype=bf16"]
    loaded = load_config(None, overrides=overrides, environ={}, cwd=tmp_path)
    with pytest.raises(ConfigError) as error:
        check_config(loaded, CPU)
    [problem] = error.value.problems
    assert problem.render().startswith(
        "--set precision.float8=true: precision.float8: is true, but the run would use CPUs: "
        "cpu: there is no NVIDIA driver"
    )


def test_vocabulary_against_the_tokenizer(tmp_path: Path) -> None:
    loaded = load_config(None, overrides=["model.vocab_size=100"], environ={}, cwd=tmp_path)
    with pytest.raises(ConfigError) as error:
        check_config(loaded, CPU)
    [problem] = error.value.problems
    assert problem.render().startswith(
        "--set model.vocab_size=100: model.vocab_size: is 100, but the tokenizer has "
    )
