import pytest

from trainkit.plan.workload import Workload, name_of, out_of_reach


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
def test_a_run_is_named_after_its_script(command, name):
    assert name_of(command.split()) == name


@pytest.mark.parametrize(
    ("command", "reads"),
    [
        ("python3 - --lr 0.1", True),
        ("python3", True),
        ("/usr/bin/python3.11 -u", True),
        ("bash -s a b", True),
        ("sh -es", True),
        ("sh", True),
        ("cat", True),
        ("tool --config -", True),
        ("python /dev/stdin", True),
        ("env X=1 python -", True),
        ("uv run python3", True),
        ("nice -n 5 bash", True),
        ("perl", True),
        ("python train.py", False),
        ("python -m mine.train", False),
        ("python -c print(1)", False),
        ("python --version", False),
        ("bash run.sh -s", False),
        ("cat notes.txt", False),
        ("echo python", False),
        ("uv run train.py", False),
        ("./train", False),
    ],
)
def test_whether_a_command_line_says_that_it_reads_standard_input(command, reads):
    assert Workload(tuple(command.split())).reads_input is reads


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (["docker", "run", "--rm", "image", "python", "train.py"], "docker"),
        (["bash", "-c", "cd work && ssh node2 python train.py"], "ssh"),
        (["bash", "-c", "TMUX= nice -n 5 tmux new -d 'python train.py'"], "tmux"),
        (["env", "A=1", "srun", "-n2", "python", "train.py"], "srun"),
        (["sh", "-c", "nohup python train.py > log 2>&1 &"], "the shell exits"),
        (["sh", "-c", "python train.py > log 2>&1 & wait"], None),
        (["bash", "-c", "python train.py 2>&1 | tee log && echo ssh"], None),
        (["python", "train.py", "--launcher", "ssh"], None),
        (["bash", "run.sh", "docker"], None),
        (["uv", "run", "train.py"], None),
        (["parallel", "python", "train.py", ":::", "1"], None),
        (["timeout", "1d", "sudo", "docker", "run", "it"], "docker"),
    ],
)
def test_what_a_notice_may_not_reach(argv, program):
    found = out_of_reach(argv)
    assert found is None if program is None else found.startswith(program)
