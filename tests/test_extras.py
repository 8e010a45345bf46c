"""Tests each extra of setup.cfg in an environment that has nothing else."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.programs import run_program
from tests.support.runs import make_attempt
from tests.test_packaging import setup_cfg
from trainkit import DISTRIBUTION
from trainkit.extras import PACKAGES, install_line, own_install_line
from trainkit.run.files import append_jsonl, read_json, utc_now, write_json
from trainkit.run.manifest import MANIFEST_NAME
from trainkit.run.record import create_job

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 600

LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=320)
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained("llama")
"""
TRAINS = """
import sys
from trainkit.cli.main import main
more = [word for item in sys.argv[1:] for word in ("--set", item)]
sets = "device=cpu data.tokenizer=bytes data.seq_len=32 train.steps=2 train.device_batch_size=1 " \\
    "train.global_batch_size=2"
code = main(["run", "quickstart", *(w for item in sets.split() for w in ("--set", item)), *more])
assert code == 0, code
"""
TRACKERS = {"mlflow": "logging.mlflow.tracking_uri=store", "wandb": "logging.wandb.mode=offline"}
USES = {
    "plot": """
from pathlib import Path
from trainkit.capabilities.bench.summary import can_plot, write_plots
from trainkit.capabilities.bench.summary import COLUMNS
assert can_plot()
row = dict.fromkeys(COLUMNS) | {"layout": "dp_shard=2", "status": "finished", "tokens_per_s": 1.5}
[file], _ = write_plots(["layout"], [row], Path("plots"))
assert file.read_bytes().startswith(b"\\x89PNG")
from trainkit.capabilities.report.plot import DrawnRun, draw, save
runs = [DrawnRun("a", {}, {"loss": {1: (1.0, 2.0), 2: (2.0, 1.0)}})]
save(draw(runs, [], ["loss"], "step", 0.0, None, on_gpu=False), Path("losses.pdf"))
assert Path("losses.pdf").read_bytes().startswith(b"%PDF")
""",
    "float8": """
import torch
from torch import nn
from trainkit.trainer.precision import apply_float8
layer = nn.Sequential(nn.Linear(32, 32, bias=False))
apply_float8([layer], emulate=True)
assert type(layer[0]) is not nn.Linear
layer(torch.randn(16, 32)).sum().backward()
""",
    "hf": f"""
import pyarrow, pyarrow.parquet, sys
pyarrow.parquet.write_table(pyarrow.table({{"text": ["a document of words " * 40] * 40}}), "texts.parquet")
sys.argv[1:] = ["model.hf=llama", "data.source=texts.parquet"]
{TRAINS}""",
    "vision": """
from pathlib import Path
from PIL import Image
from trainkit.capabilities.multimodal.task import MediumFormat
medium = MediumFormat("image", 4, 2)
Image.new("RGB", (2, 2)).save("image.png")
assert medium.read_image(Path("image.png")).shape == (4, 12)
Path("image.png").write_bytes(b"no image")
try:
    medium.read_image(Path("image.png"))
except ValueError as error:
    assert "cannot be opened" in str(error)
""",
    "peft": """
from transformers import AutoModelForCausalLM
from trainkit.adapters import add_adapters
from trainkit.config import load_config
given = ["model.hf=llama", "data.tokenizer=bytes", "model.lora={r: 2, target_modules: [q_proj, v_proj]}"]
model = AutoModelForCausalLM.from_pretrained("llama")
add_adapters(model, load_config(None, overrides=given).config)
assert {name.split(".")[-3] for name, one in model.named_parameters() if one.requires_grad} == {
    "lora_A", "lora_B"
}
""",
    "qlora": """
import peft, torch, transformers
from trainkit.trainer.quantization import NF4Linear
layer = torch.nn.Linear(64, 64)
quantized = NF4Linear(layer)
quantized.quantize(layer.weight)
assert (quantized.weight_in(torch.float32) - layer.weight).abs().max() < 0.05
""",
    "tensorboard": f"""import sys
sys.argv[1:] = ["logging.tensorboard=true"]
{TRAINS}
from pathlib import Path
assert [*Path("runs").glob("*/tensorboard/events.out.tfevents.*")]
""",
    "watch": """
import asyncio
from trainkit.capabilities.watch.screen import WatchApp
async def quit_it():
    app = WatchApp(None, 2.0)
    async with app.run_test() as pilot:
        await pilot.press("q")
    assert app.return_code == 0
asyncio.run(quit_it())
""",
    "mlflow": """
from trainkit.cli.main import main
assert main(["sync", "run"]) == 0
import mlflow
mlflow.set_tracking_uri("sqlite:///store/mlflow.db")
assert len(mlflow.search_runs(search_all_experiments=True)) == 1
""",
    "wandb": """
from pathlib import Path
from trainkit.cli.main import main
assert main(["sync", "run"]) == 0
assert [*Path("run").glob("wandb/offline-run-*/*.wandb")]
""",
}

pytestmark = [pytest.mark.slow(seconds=12), pytest.mark.xdist_group("extras")]


def requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Return the requirements in setup.cfg, and the additional ones of each extra."""
    config = setup_cfg()
    extras = {
        name: [line for line in text.split("\n") if line and not line.startswith("#")]
        for name, text in config["options.extras_require"].items()
    }
    return config["options"]["install_requires"].split("\n")[1:], extras


def closure(requirements: list[str]) -> set[str]:
    """Return the distributions of this environment that a list of requirements includes."""
    found: set[str] = set()
    pending = [Requirement(line) for line in requirements]
    while pending:
        item = pending.pop()
        name = re.sub(r"[-_.]+", "-", item.name).lower()
        if name not in found and (item.marker is None or item.marker.evaluate({"extra": ""})):
            found.add(name)
            pending += [Requirement(line) for line in requires(name) or ()]
    return found


def environment(folder: Path, requirements: list[str]) -> Path:
    """Return the interpreter of a new environment with links to the required packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    [site] = (folder / "venv").glob("lib/*/site-packages")
    (site / "trainkit.pth").write_text(f"{ROOT}\n")
    for name in closure(requirements):
        installed = distribution(name)
        assert installed.files is not None
        for top in {file.parts[0] for file in installed.files} - {"..", "__pycache__"}:
            link = site / top
            if not link.is_symlink():
                link.symlink_to(str(installed.locate_file(top)))
    return python


def execute(python: Path, code: str, folder: Path) -> str:
    """Return the output of a program, which must succeed."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config")}
    (folder / "uses.py").write_text(code)
    done = run_program(python, "uses.py", cwd=folder, env=environ, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of transformers."""
    folder = tmp_path_factory.mktemp("model")
    execute(Path(sys.executable), LLAMA, folder)
    return folder / "llama"


def saved_run(folder: Path, setting: str) -> None:
    """Create a run with a step and a checkpoint, which its nodes could not send to a tracker."""
    attempt = make_attempt(folder / "run", [setting])
    write_json(attempt.run.plan_file, read_json(attempt.plan_file))
    create_job(attempt.run, backend="local", name="run", cwd=str(folder), code=None)
    append_jsonl(attempt.run.metrics_file, {"step": 1, "time": utc_now(), "attempt": 1, "loss": 1.0})
    attempt.run.checkpoint_dir(1).mkdir(parents=True)
    (attempt.run.checkpoint_dir(1) / MANIFEST_NAME).write_text("{}")


@pytest.mark.parametrize("extra", sorted(USES))
def test_an_extra_is_all_that_its_feature_needs(
    extra: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    core, extras = requirements()
    if extra in TRACKERS:
        saved_run(tmp_path, TRACKERS[extra])
    if "llama" in USES[extra]:
        (tmp_path / "llama").symlink_to(request.getfixturevalue("llama"))
    execute(environment(tmp_path, core + extras[extra]), USES[extra], tmp_path)


def test_a_run_without_any_extra(tmp_path: Path) -> None:
    python = environment(tmp_path, requirements()[0])
    code = f"""import contextlib, importlib, io, os, pkgutil, pty, sys
{TRAINS}
for line in ("watch last --once", "watch --once", "status last", "report last"):
    assert main(line.split()) == 0, line
for line in ("check quickstart --set logging.tensorboard=true", "ui last"):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert main(line.split()) == 2, line
    assert "pip install 'tensorboard>=2.16'" in said.getvalue()
assert os.waitstatus_to_exitcode(pty.spawn([sys.executable, "-m", "trainkit", "watch", "last"])) == 2
import trainkit
names = {{m.name for m in pkgutil.walk_packages(trainkit.__path__, "trainkit.") if "__main__" not in m.name}}
assert len(names) > 100
# Only the screen of `watch` and the class of figures need their libraries to be imported.
for name in names - {{"trainkit.capabilities.watch.screen", "trainkit.capabilities.report.figure"}}:
    importlib.import_module(name)
extras = "matplotlib torchao transformers pyarrow PIL peft bitsandbytes mlflow wandb tensorboard textual"
for extra in extras.split():
    assert importlib.util.find_spec(extra) is None, extra
"""
    shown = re.sub(r"\x1b\[\d*m", "", execute(python, code, tmp_path))  # `error:` is red in a terminal
    assert "error: the package textual " in shown
    assert "hint: `pip install 'textual>=8,<9'`; " in shown
    log = (tmp_path / "runs/quickstart/attempts/001/logs/rank-0000.log").read_text()
    [line] = [line for line in log.splitlines() if "tensorboard" in line.lower()]
    assert "No module" in line


def test_every_extra_has_a_use_here() -> None:
    assert set(requirements()[1]) - {"test"} == set(USES)


def test_messages_name_the_packages_of_setup_cfg() -> None:
    _, extras = requirements()
    named = {name: tuple(extras[name]) for name in extras if name != "test"}
    assert named == dict(PACKAGES)
    assert install_line("hf", "peft", python="/a b/python") == (
        "'/a b/python' -m pip install 'transformers>=5' 'pyarrow>=17' 'peft>=0.18'"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"url": "file://{}/a%20wheel.whl"}, "'{}/a wheel.whl'"),
        ({"url": "file://{}/gone", "dir_info": {"editable": True}}, None),
        (
            {"url": "https://host/t.git", "vcs_info": {"vcs": "git", "commit_id": "ab"}},
            "git+https://host/t.git@ab",
        ),
    ],
)
def test_trainkit_is_installed_from_where_it_came(
    source: dict[str, object], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a wheel.whl").touch()
    info = tmp_path / "trainkit_hpc-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 0.1.0\n")
    (info / "direct_url.json").write_text(json.dumps(source).replace("{}", str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path)
    line = expected and f"'/a b/python' -m pip install {expected}".replace("{}", str(tmp_path))
    assert own_install_line("/a b/python") == line


def test_the_program_reports_another_package_of_this_name(tmp_path: Path) -> None:
    (tmp_path / "trainkit").mkdir()
    (tmp_path / "trainkit" / "__init__.py").touch()
    program = Path(sys.executable).with_name("trainkit")
    done = run_program(program, "--version", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        f"error: `import trainkit` finds {tmp_path}/trainkit/__init__.py, another package called trainkit"
    )


def test_no_text_installs_a_distribution_of_this_name_from_an_index() -> None:
    """The distribution of this name on PyPI is another project.

    A path to a checkout or a wheel is no index.
    """
    suffixes = {".py", ".md", ".yaml", ".j2", ".pyi", ".sh", ".cfg", ".toml"}
    folders = (ROOT / name for name in ("trainkit", "docs", "templates", "configs", "examples", "tools"))
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *files]
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"(?:install|add|with)\b[^`]*[ '\"]trainkit(?:\[|[=<>~]|['\"` ]|$)", line)
        and re.search(r"\b(?:pip|pipx|uv|uvx|poetry|conda|mamba)\b", line)
        and not re.search(r"\btrainkit/|PATH/TO", line)
    ]
    assert not wrong
