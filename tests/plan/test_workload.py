import pytest

from trainkit.plan.workload import Workload, name_of, out_of_reach

NAMES = {
    **{"python -u src/train.py --lr 0.1": "train", "pretrain_gpt.py --mock-data": "pretrain_gpt"},
    **{"torchrun --nproc-per-node 2 -m mine.finetune --seed 1": "finetune", "./train.sh": "train"},
    "my-trainer config.toml": "my-trainer",
    **dict.fromkeys(("python -c print(1)", "python last.py", "python 12.py", "python .hidden.py", "")),
}
READ_INPUT = (
    *(
        *("python3 - --lr 0.1", "python3", "/usr/bin/python3.11 -u", "bash -s a b", "sh -es", "sh", "cat"),
        "perl",
    ),
    *("tool --config -", "python /dev/stdin", "env X=1 python -", "uv run python3", "nice -n 5 bash"),
)
READ_NO_INPUT = (
    *("python train.py", "python -m mine.train", "python -c print(1)", "python --version", "bash run.sh -s"),
    *("cat notes.txt", "echo python", "uv run train.py", "./train"),
)


def test_a_run_is_named_after_its_script():
    assert {command: name_of(command.split()) for command in NAMES} == NAMES


def test_whether_a_command_line_says_that_it_reads_standard_input():
    assert [command for command in READ_INPUT if not Workload(tuple(command.split())).reads_input] == []
    assert [command for command in READ_NO_INPUT if Workload(tuple(command.split())).reads_input] == []


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (["docker", "run", "--rm", "image", "python", "train.py"], "docker"),
        (["bash", "-c", "cd work && ssh node2 python train.py"], "ssh"),
        (["bash", "-c", "TMUX= nice -n 5 tmux new -d 'python train.py'"], "tmux"),
        (["env", "A=1", "srun", "-n2", "python", "train.py"], "srun"),
        (["sh", "-c", "nohup python train.py > log 2>&1 &"], "the shell exits"),
        (["timeout", "1d", "sudo", "docker", "run", "it"], "docker"),
        (["sh", "-c", "python train.py > log 2>&1 & wait"], None),
        (["bash", "-c", "python train.py 2>&1 | tee log && echo ssh"], None),
        *((["python", "train.py", "--launcher", "ssh"], None), (["bash", "run.sh", "docker"], None)),
        *((["uv", "run", "train.py"], None), (["parallel", "python", "train.py", ":::", "1"], None)),
    ],
)
def test_what_a_notice_may_not_reach(argv, program):
    found = out_of_reach(argv)
    assert found is None if program is None else found.startswith(program)
