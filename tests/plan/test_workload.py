import pytest

from trainkit.plan.workload import name_of


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python -u src/train.py --lr 0.1", "train"),
        ("pretrain_gpt.py --mock-data", "pretrain_gpt"),
        ("torchrun --nproc-per-node 2 -m mine.finetune --seed 1", "finetune"),
        ("./train.sh", "train"),
        ("my-trainer config.toml", "my-trainer"),
        ("python -c print(1)", None),
        ("python last.py", None),
        ("python 12.py", None),
        ("python .hidden.py", None),
        ("", None),
    ],
)
def test_a_run_is_named_after_its_script(command: str, name: str | None) -> None:
    assert name_of(command.split()) == name
