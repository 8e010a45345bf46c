"""Runs the commands of README and docs, and checks that every link, key and quoted message exists.

A block marked ```console is fast and runs in `make test`. A ```console slow block starts a training run and a
```console slurm block needs a cluster, so both run in `make test-all`. A ```text block is not run.
"""

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.support.programs import RunProcesses
from tools import reference
from tools.slurm_cluster.cluster import Cluster
from trainkit.capabilities.drill.result import HEADING
from trainkit.config import load_config
from trainkit.run.manifest import published
from trainkit.run.rundir import RunDir

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
LINKING = (
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    ROOT / "benchmarks" / "README.md",
)
FENCE = re.compile(r"^```(.*)\n", re.MULTILINE)
SHORT = {
    "TRAINKIT_MODEL__PRESET": "nano",
    "TRAINKIT_DATA__SEQ_LEN": "32",
    "TRAINKIT_TRAIN__STEPS": "40",
    "TRAINKIT_TRAIN__EPOCHS": "null",
    "TRAINKIT_TRAIN__EVAL_BATCHES": "1",
    "TRAINKIT_CHECKPOINT__EVERY_STEPS": "10",
    "TRAINKIT_LOGGING__TENSORBOARD": "false",
}
"""Variables that limit training to seconds without a change of the commands."""
INTERACTIVE = ("trainkit shell", "trainkit attach")


def blocks(page: Path, *kinds: str) -> list[str]:
    """Return the fenced blocks of these kinds, in their order. Every second fence closes a block."""
    parts = FENCE.split(page.read_text(encoding="utf-8"))
    return [text for kind, text in zip(parts[1::4], parts[2::4], strict=True) if kind in kinds]


def commands(page: Path, *kinds: str) -> list[str]:
    """Return the commands in a page's blocks of these kinds, without comments."""
    lines = [line[2:] for text in blocks(page, *kinds) for line in text.splitlines() if line.startswith("$ ")]
    return [re.split(r"\s{2,}#", line)[0].strip() for line in lines]


def pages_with(*kinds: str) -> list[str]:
    return [page.name for page in PAGES if commands(page, *kinds)]


def page_named(name: str) -> Path:
    return next(page for page in PAGES if page.name == name)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the docs assume.

    The files are texts, a tokenizer, scripts and the README's config.
    """
    folder = tmp_path_factory.mktemp("files")
    text = "".join(f"line {number} says {number * number}\n" for number in range(4000))
    (folder / "mytext.txt").write_text(text)
    (folder / "corpus").mkdir()
    (folder / "corpus" / "one.txt").write_text(text)
    (folder / "corpus" / "two.jsonl").write_text('{"text": "a row of its own"}\n' * 400)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"])
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    # The last trial of a sweep exists to be cancelled and resumed.
    script = "import os, sys, time\nprint(os.environ['RANK'])\ntime.sleep(600 * (sys.argv[-1] == '1e-3'))\n"
    (folder / "train.py").write_text(script)
    (folder / "mine.yaml").write_text(
        next(block for block in blocks(README, "yaml") if "name: mine" in block)
    )
    (folder / "curves.yaml").write_text(blocks(page_named("multimodal.md"), "yaml")[0])
    (folder / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "make_questions.py", folder / "examples")
    quickstart = (ROOT / "configs" / "quickstart.yaml").read_text()
    wrong = quickstart.replace("global_batch_size: 32", "global_batch_size: 30")
    assert wrong != quickstart
    (folder / "wrong.yaml").write_text(wrong)
    return folder


@pytest.fixture
def sandbox(corpus: Path, tmp_path: Path) -> Path:
    """Return a folder that contains only the files of `corpus`."""
    return Path(shutil.copytree(corpus, tmp_path / "project"))


def environ_of(folder: Path, **environ: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{environ.pop('PATH', os.environ['PATH'])}"
    home = {f"XDG_{name}_HOME": str(folder / "home" / name) for name in ("STATE", "CACHE", "CONFIG")}
    return {**os.environ, **home, **environ, "PATH": path}


def run(command: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Type a command. A command that follows a log gets Ctrl-C once a checkpoint exists.

    Its run then waits for the next command, because such a short run would otherwise be over.
    """
    with subprocess.Popen(
        ["bash", "-c", f"exec {command}" if " | " not in command else command],
        cwd=folder,
        env=environ_of(folder, **environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        if command.endswith(" -f"):
            name = shlex.split(command)[2]
            newest = max((folder / "runs").glob("*/job.json"), key=lambda file: file.stat().st_mtime)
            followed = RunDir(newest.parent if name == "last" else folder / "runs" / name)
            while process.poll() is None and not published(followed.checkpoints_dir):
                time.sleep(0.02)
            for pid in RunProcesses.of(followed).ranks.values():
                os.kill(pid, signal.SIGSTOP)
            process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=600)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def run_all(found: list[str], folder: Path, **environ: str) -> None:
    """Type commands in sequence. Each one must succeed, and runs that remain at the end are killed."""
    try:
        for command in found:
            done = run(command, folder, **environ)
            expected = 130 if command.endswith(" -f") else 0
            assert done.returncode == expected, f"{command}\n{done.stdout}\n{done.stderr}"
    finally:
        for job in [path for name in ("job", "sweep") for path in (folder / "runs").glob(f"*/{name}.json")]:
            if not (job.parent / "attempts" / "latest" / "end.json").exists():
                run(f"trainkit cancel {shlex.quote(str(job.parent))} --now", folder, **environ)


@pytest.mark.parametrize("page", pages_with("console"))
def test_every_cheap_command_works(page: str, sandbox: Path) -> None:
    run_all(commands(page_named(page), "console"), sandbox)


@pytest.mark.slow(seconds=30)
@pytest.mark.parametrize("page", [page for page in pages_with("console slow") if page != README.name])
def test_every_command_works_in_the_order_of_the_text(page: str, sandbox: Path) -> None:
    few = {"TRAINKIT_TRAIN__STEPS": "4", "TRAINKIT_CHECKPOINT__EVERY_STEPS": "2"}
    run_all(commands(page_named(page), "console", "console slow"), sandbox, **{**SHORT, **few})


@pytest.mark.slow(seconds=30)
def test_the_readme_typed_twice(sandbox: Path) -> None:
    elsewhere = commands(page_named("own-task.md"), "console slow")[1:]
    found, runs = commands(README, "console", "console slow"), sandbox / "runs"
    run_all([command for command in found if command not in elsewhere], sandbox, **SHORT)
    assert losses(runs / "killed") == losses(runs / "quickstart")
    assert len(json.loads((runs / "killed" / "job.json").read_text())["attempts"]) == 2
    # The second time, the command overwrites nothing and says so. This does not need another training run.
    written = {file: file.read_bytes() for file in runs.rglob("*.jsonl")}
    for name in ("quickstart", "killed"):
        run_all([f"trainkit submit --name {name} --follow -- true"], sandbox)
        assert (runs / f"{name}-2" / "job.json").exists()
    assert {file: file.read_bytes() for file in written} == written
    assert "ring.py already" in run("trainkit init --task ring", sandbox).stderr


def losses(run_folder: Path) -> dict[int, object]:
    """Return the losses of a run by step. If a step was computed twice, the later loss counts."""
    records = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    found = {record["step"]: record["loss"] for record in records}
    assert len(found) > 1
    return found


@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize("page", [page for page in pages_with("console slurm") if page != "doctor.md"])
def test_every_slurm_command_works(page: str, sandbox: Path, cluster: Cluster) -> None:
    # The GPUs of the cluster are not real. on_slurm/test_doctor.py types the command of doctor.md.
    few = {"TRAINKIT_RESOURCES__GPUS_PER_NODE": "1", "TRAINKIT_TRAIN__STEPS": "3"}
    short = {**SHORT, **few, "TRAINKIT_DEVICE": "cpu"}
    elsewhere = commands(page_named("own-script.md"), "console slurm") if page == README.name else []
    found = [line for line in commands(page_named(page), "console slurm") if not line.startswith(INTERACTIVE)]
    run_all([line for line in found if line not in elsewhere], sandbox, **cluster.environ, **short)


def test_the_error_that_is_shown_is_the_one_that_comes(sandbox: Path) -> None:
    shown = next(block for block in blocks(README, "") if block.startswith("error: "))
    done = run("trainkit check wrong.yaml --nodes 2", sandbox)
    assert done.returncode == 2
    assert done.stderr.split() == shown.split()


def test_the_plan_that_is_shown_is_the_one_that_comes(sandbox: Path) -> None:
    page = ROOT / "docs" / "layouts.md"
    command = next(line for line in commands(page, "console") if line.startswith("trainkit plan"))
    done = run(f"{command} 2>&1", sandbox)
    shown = next(block for block in blocks(page, "text") if "recommended: " in block)
    for shortened, line in zip(shown.splitlines(), done.stdout.splitlines(), strict=True):
        start, _, end = shortened.partition("...")
        assert line.startswith(start.rstrip())
        assert line.endswith(end)


def test_the_drill_that_is_shown_has_the_columns_of_the_command() -> None:
    page = (ROOT / "docs" / "recovery.md").read_text()
    [heading] = re.findall(rf"^{HEADING[0]} .*$", page, re.MULTILINE)
    assert re.split(r"\s{2,}", heading) == HEADING


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


@pytest.mark.parametrize("name", reference.PAGES)
def test_generated_pages_are_current(name: str) -> None:
    current = (reference.DOCS / name).read_text(encoding="utf-8") == reference.PAGES[name]()
    assert current, f"docs/{name} is out of date; write it anew with: {reference.REGENERATE}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings, in GitHub's form, and the keys of the config."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r'<a id="([^"]+)"></a>', text)
    return {*named, *(reference.anchor_of(heading) for heading in reference.headings(text))}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_the_threat_model_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "threat-model.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert rows
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row)
        assert named, row
        for file, test in named:
            assert f"def {test}" in (ROOT / file).read_text(), (file, test)


def test_the_readme_links_every_page() -> None:
    linked = set(re.findall(r"\]\(docs/([^)#]+\.md)\)", README.read_text()))
    assert linked == {page.name for page in PAGES[1:]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_config_in_yaml_is_valid(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Llama-3.2-1B").mkdir()
    (tmp_path / "Llama-3.2-1B" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "Llama-3.2-1B" / "tokenizer.json").write_text("{}")
    for block in blocks(page, "yaml"):
        (tmp_path / "shown.yaml").write_text(block)
        load_config(tmp_path / "shown.yaml", layers=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_config_key_exists(page: Path) -> None:
    keys = set(re.findall(r"^- <a id=.*?></a>`([\w.]+)`", reference.config_text(), re.MULTILINE))
    assert len(keys) > 100
    sections = {key.partition(".")[0] for key in keys if "." in key}
    files = {"config.yaml", "data.source", "model.safetensors", "model.training", "model.state_dict"}
    text = re.sub(r"```python\n.*?```", "", page.read_text(), flags=re.DOTALL)
    named = set(re.findall(rf"(?<![\w./])((?:{'|'.join(sections)})\.[a-z]\w*)", text))
    unknown = {key for key in named - keys - files if not key.endswith((".json", ".yaml", ".py", ".md"))}
    assert not unknown


def test_every_command_and_option_of_the_docs_exists() -> None:
    found = reference.all_commands()
    items = [item for command in found.values() for item in command.params]
    options = {"--help", *(name for item in items for name in (*item.opts, *item.secondary_opts))}
    generated = (ROOT / "trainkit/capabilities/launchers/config_files.py").read_text()
    for page in PAGES:
        text = page.read_text()
        for name in re.findall(r"`trainkit ([a-z]+)\b", text):
            assert f"trainkit {name}" in found, (page.name, name)
        for option in re.findall(r"`(--[a-z][a-z-]+)", text):
            is_generated = f'"{option}"' in generated
            elsewhere = {*SLURM_OPTIONS, *OPTIONS_OF_LAUNCHED_TOOLS}
            assert option in options or option in elsewhere or is_generated, (page.name, option)


OPTIONS_OF_LAUNCHED_TOOLS = {
    *("--max-restarts", "--standalone"),  # torchrun
    *("--config", "--init"),  # accelerate has --config_file, and nanoGPT has --init_from
    *("--adam-beta", "--bf", "--fp", "--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
    *("--context-parallel-size", "--load", "--save", "--use-distributed-optimizer", "--use-megatron-fsdp"),
    "--exit-signal-handler",  # Megatron has --bf16 and --fp16
}
SLURM_OPTIONS = {
    *("--mail-type", "--mail-user", "--requeue", "--no-requeue", "--signal", "--open-mode", "--mpi"),
    *("--kill-on-bad-exit", "--wait", "--no-kill", "--gres", "--cpus-per-task", "--api-key"),
}
"""Options of Slurm's commands and of a COMMAND that the docs name."""


@cache
def text_of_the_code() -> str:
    """Return every string of the code, with … in place of inserted values, between NUL characters."""
    found: list[str] = []
    for path in (ROOT / "trainkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Constant, ast.JoinedStr)):
                found.append("".join(_pieces(node)))
    return "\0".join(found)


def _pieces(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from _pieces(value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        yield "…"


def is_in_the_code(message: str) -> bool:
    """Return whether a string of the code contains the pieces of a message between … in this order."""
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
    return re.search("[^\0]*?".join(parts), text_of_the_code()) is not None


def test_every_message_of_the_troubleshooting_page_is_in_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [one.strip().strip("`").strip() for one in re.findall(r"^### (`.*`)$", text, re.MULTILINE)]
    reasons = text[text.index("## When a run does not restart") : text.index("## When a run resumes")]
    quoted += re.findall(r"^\| `(.*?)` \|", reasons, re.MULTILINE)
    assert len(quoted) > 30
    assert [message for message in quoted if not is_in_the_code(message)] == []


def test_the_pages_count_and_list_the_layouts_of_the_parity_benchmark() -> None:
    from benchmarks.parity import CASES

    count, table = len(CASES), (ROOT / "benchmarks/README.md").read_text()
    assert f"trains a model with {count} layouts" in (ROOT / "docs/layouts.md").read_text()
    assert f"among the {count} layouts" in table
    assert [case.name for case in CASES if f"| {case.num_procs} | {case.name} |" not in table] == []
