"""Types careless commands, compares their errors and hints, and follows some of the hints."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import time
from pathlib import Path

import pytest
from steering import unpack_live_run

from tests.golden.__main__ import HERE as GOLDEN
from tests.golden.__main__ import unpack_run, write_text_file
from tests.support.said import said
from trainkit.cli.main import main
from trainkit.cli.usage import cut_setting
from trainkit.folders import shipped_config_names

RUNS = ("finished", "cancelled", "command", "sweep")
FILES = {
    **{"empty.yaml": "", "tabs.yaml": "train:\n\tsteps: 3\n", "windows.yaml": "train:\r\n  stpes: 3\r\n"},
    **{"open.yaml": "train: {steps: 3\n", "colon.yaml": "name: a: b\n", "list.yaml": "- train\n"},
    **{"twice.yaml": "train:\n  steps: 3\n  steps: 4\n", "space.yaml": "optimizer:\n  lr:1e-3\n"},
    **{"indent.yaml": "train:\nsteps: 3\n", "quoted.yaml": "train: {steps: “200”}\n"},
    **{"account.yaml": "resources: {account: 0123456}\n", "number.yaml": "name: 12345\n"},
    **{"other.yaml": "learning_rate: 1e-3\n", "self.yaml": "extends: self.yaml\n"},
    **{"hours.yaml": "resources: {time: 24}\n", "hydra.yaml": "name: ${oc.env:USER}\n"},
    **{"defaults.yaml": "defaults: [a]\n", "gres.yaml": "resources: {gres: 'gpu:4'}\n"},
    **{"deeper.yaml": "train:\n  steps: 3\n    log_every: 1\n", "minutes.yaml": "resources: {time: 24:00}\n"},
    **{"slices.yaml": "resources: {time: 24:00:00, slice: 04:00}\n", "memory.yaml": "resources: {mem: 64}\n"},
    **{"megabytes.yaml": "resources: {mem: '64'}\n", "warm.yaml": "schedule: {warmup_steps: 500}\n"},
    "floor.yaml": "schedule: {name: wsd, min_lr_ratio: 0}\n",
    "short.yaml": "schedule: {min_lr_ratio: 0, warmup_steps: 200}\n",
    "flat.yaml": "schedule: {name: constant, min_lr_ratio: 0}\n",
    **{"never.yaml": "checkpoint: {every_steps: null}\n", "missing.yaml": "optimizer:\n  lr: ???\n"},
    "source.yaml": "data: {source: '${hydra:runtime.cwd}/corpus'}\n",
    "dedent.yaml": "train:\n    steps: 3\n  log_every: 1\n",
    "between.yaml": "train:\n  steps: 3\n log_every: 1\n",
    **{"firstline.yaml": "  train:\n    steps: 3\nseed: 1\n", "nocolon.yaml": "train\n  steps: 3\n"},
    **{"equals.yaml": "train:\n  steps = 3\n", "toml.yaml": "[train]\nsteps = 3\n"},
    **{"dashes.yaml": "train:\n- steps: 3\n", "star.yaml": "note: *star\n"},
    **{"quote.yaml": "note: 'open\nseed: 1\n", "wandb.yaml": "parameters: {lr: {values: [1e-4, 3e-4]}}\n"},
    "target.yaml": "optimizer: {_target_: torch.optim.AdamW}\n",
    **{"momentum.yaml": "optimizer: {momentum: 0.9}\n", "kind.yaml": "optimizer: {type: AdamW}\n"},
    **{"half.yaml": "precision: {dtype: 16-mixed}\n", "outputs.yaml": "output_dir: out\n"},
    "range.yaml": "resources: {time: 1:00:00-2:00:00}\n",
    **{"variable.yaml": "launch: {env: {A: '${oc.env:HOME}'}}\n", "remark.yaml": "note: ${oc.env:USER}\n"},
    "sweep.yaml": "method: grid\nparameters:\n  lr: {values: [1e-4, 3e-4]}\n",
    "bayes.yaml": (
        "program: train.py\nmethod: bayes\nmetric:\n  name: val_loss\n  goal: minimize\nparameters:\n"
        "  learning_rate:\n    min: 0.0001\n    max: 0.1\nearly_terminate:\n  type: hyperband\n"
    ),
    "random.yaml": (
        "program: train.py\nname: my sweep\nproject: p\nmethod: random\nparameters:\n"
        "  seed: {values: [1, 2]}\ncommand:\n- ${env}\n- python3\n- ${program}\n- ${args}\n"
    ),
    "accelerate.yaml": (
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: MULTI_GPU\n"
        "downcast_bf16: 'no'\ngpu_ids: all\nmachine_rank: 0\nmain_training_function: main\n"
        "mixed_precision: bf16\nnum_machines: 1\nnum_processes: 4\nrdzv_backend: static\n"
        "same_network: true\ntpu_env: []\nuse_cpu: false\n"
    ),
    "fsdp.yaml": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n"
        "  fsdp_sharding_strategy: FULL_SHARD\nnum_processes: 8\n"
    ),
    "lightning.yaml": (
        "seed_everything: 42\ntrainer:\n  accelerator: gpu\n  devices: 4\n  max_epochs: 3\nmodel:\n"
        "  class_path: my.Model\n  init_args:\n    lr: 0.1\ndata:\n  class_path: my.Data\n"
    ),
    **{"fit.yaml": "fit:\n  trainer:\n    max_epochs: 3\n", "trainer.yaml": "trainer: {devices: 4}\n"},
    "opt.yaml": "optimizer:\n  class_path: torch.optim.Adam\n  init_args: {lr: 0.1}\n",
    "lr.yaml": "optimizer: {lr: '${oc.env:LR}'}\n",
    "dim.yaml": "model: {dim: 64, ffn_dim: '${model.dim}'}\n",
    "nested.yaml": "train: {steps: '${oc.decode:${oc.env:STEPS}}'}\n",
    **{"now.yaml": "name: run-${now:%Y-%m-%d}\n", "part.yaml": "optimizer: {betas: ['${beta}', 0.95]}\n"},
    **{"sec.yaml": "optimizer: ${optim}\n", "init.yaml": "model: {init_from: '${oc.env:CKPT}/x'}\n"},
    **{"config/a.yaml": "seed: 1\n", "train.py": "print(1)\n", "run.sh": "true\n"},
}


def make_folder(folder: Path) -> None:
    """Create files, four ended runs, and a run that still runs."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())
    write_text_file(folder)
    for name in RUNS:
        unpack_run(GOLDEN / "folders" / name, folder, os.uname().nodename)
    unpack_live_run(GOLDEN / "folders" / "cancelled", folder)


def typed(line: str) -> tuple[int, str]:
    """Return the exit code and the standard error of a command."""
    with contextlib.redirect_stderr(io.StringIO()) as err:
        return main(shlex.split(line)[1:]), err.getvalue()


TABLE = Path(__file__).with_name("careless.txt")
"""The file with the commands. Each paragraph has a command, its error, its hint, and often a command that
follows the hint."""
CASES = [
    dict(re.split("(?:: | )", line, maxsplit=1) for line in text.splitlines())
    for text in TABLE.read_text().split("\n\n")
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    make_folder(folder)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    return folder


@pytest.fixture
def here(project, monkeypatch):
    """Return the folder where commands are typed, on a machine without Slurm and without a GPU."""
    monkeypatch.chdir(project)
    monkeypatch.setenv("PATH", str(project / "bin"))
    return project


def names_in(here: Path) -> set[Path]:
    """Return what is in the folder, and in each of its runs."""
    return {item for folder in (here, *here.glob("runs/*"), here / "runs") for item in folder.iterdir()}


@pytest.mark.parametrize("case", CASES, ids=[case["$"] for case in CASES])
def test_a_careless_command(here, case):
    before = names_in(here)
    code, err = typed(case["$"])
    hint = case["hint"].replace("SHIPPED", ", ".join(shipped_config_names()))
    assert (code, err.partition("error: ")[2]) == (2, f"{case['error']}\n\nhint: {hint}\n")
    assert str(here) not in err
    assert names_in(here) == before  # the command started and wrote nothing
    if "then" in case:
        code, err = typed(case["then"])
        assert code == 0, err


SHOWS_PATHS = """\
submit --dry-run -- python train.py
run --dry-run
status
watch finished --once
diagnose cancelled
cancel finished
cancel sweep
ckpt ls command
ckpt verify finished
ckpt prune finished --keep-last 1 --dry-run
compare finished cancelled
data validate text.txt
check a.yaml
""".splitlines()


@pytest.mark.parametrize("line", SHOWS_PATHS)
def test_paths_are_as_short_as_they_can_be(here, line):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        _, err = typed(f"trainkit {line}")
    assert str(here) not in out.getvalue() + err


READS = (
    *("status", "status live", "watch live --once", "logs cancelled", "diagnose cancelled"),
    *("ckpt ls finished", "compare finished cancelled", "report finished --out ../page.html"),
)


@pytest.mark.parametrize("line", READS)
def test_what_only_reads_writes_nothing(here, line):
    before = {file: file.lstat().st_mtime_ns for file in here.rglob("*")}
    with contextlib.redirect_stdout(io.StringIO()):
        assert typed(f"trainkit {line}")[0] == 0
    assert {file: file.lstat().st_mtime_ns for file in here.rglob("*")} == before


def test_what_is_seldom_meant(here):
    """The last two configs have no warning."""
    for name in [
        *("minutes", "slices", "megabytes", "warm", "floor", "variable", "remark", "never", "short", "flat")
    ]:
        code, err = typed(f"trainkit check {name}.yaml")
        assert code == 0
        said(err)


def test_a_folder_that_was_deleted(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    error = "error: the current folder was deleted\n\nhint: `cd` to an existing folder\n"
    assert typed("trainkit status") == (2, error)


def test_values_behind_a_space_belong_to_the_setting():
    for loose in ("2", "2,3", "=2", "2,,3,", "1e-3,-.5"):
        assert "--sweep seed=1," in str(cut_setting(["--set", "seed=1", loose], loose).hint)
    # A name of many digits is no value.
    for name in (f"{'2' * 5000}x.yaml", f"{'2,' * 5000}x.yaml"):
        began = time.monotonic()
        assert cut_setting(["--set", "seed=1", name], name) is None
        assert time.monotonic() - began < 5
