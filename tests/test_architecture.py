"""Checks the shape of the code in its syntax trees: the allowed imports, and the rules for every module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import requires
from itertools import pairwise
from operator import add, ge, le
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_packaging import setup_cfg
from trainkit.plan.torch_build import OLDEST, REQUIREMENT

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trainkit"
SIZES = {
    "trainkit": (21, 6_361),
    "trainkit/backends": (21, 4_677),
    "trainkit/capabilities": (1, 1),
    "trainkit/capabilities/average": (3, 234),
    "trainkit/capabilities/bench": (6, 1_467),
    "trainkit/capabilities/curves": (4, 1_089),
    "trainkit/capabilities/debugger": (5, 663),
    "trainkit/capabilities/diagnose": (7, 1_509),
    "trainkit/capabilities/doctor": (6, 1_427),
    "trainkit/capabilities/drill": (5, 1_139),
    "trainkit/capabilities/ema": (3, 160),
    "trainkit/capabilities/evaluations": (9, 1_195),
    "trainkit/capabilities/export": (3, 561),
    "trainkit/capabilities/generate": (3, 326),
    "trainkit/capabilities/growth": (3, 703),
    "trainkit/capabilities/health": (4, 527),
    "trainkit/capabilities/init": (3, 355),
    "trainkit/capabilities/launchers": (4, 521),
    "trainkit/capabilities/layouts": (5, 949),
    "trainkit/capabilities/media": (6, 626),
    "trainkit/capabilities/multimodal": (2, 564),
    "trainkit/capabilities/notifications": (5, 526),
    "trainkit/capabilities/programs": (5, 548),
    "trainkit/capabilities/replay": (7, 1_688),
    "trainkit/capabilities/replicas": (3, 162),
    "trainkit/capabilities/report": (13, 3_666),
    "trainkit/capabilities/shell": (3, 195),
    "trainkit/capabilities/simulation": (4, 333),
    "trainkit/capabilities/slow_ranks": (8, 735),
    "trainkit/capabilities/spike": (3, 185),
    "trainkit/capabilities/stacks": (2, 144),
    "trainkit/capabilities/task_check": (3, 483),
    "trainkit/capabilities/texts": (9, 1_866),
    "trainkit/capabilities/trackers": (6, 1_133),
    "trainkit/capabilities/transformers": (2, 306),
    "trainkit/capabilities/watch": (5, 1_367),
    "trainkit/cli": (17, 4_367),
    "trainkit/cluster": (9, 1_965),
    "trainkit/config": (16, 4_470),
    "trainkit/control": (6, 1_006),
    "trainkit/data": (6, 931),
    "trainkit/job": (30, 7_124),
    "trainkit/launch": (18, 4_119),
    "trainkit/observe": (8, 1_882),
    "trainkit/plan": (20, 4_790),
    "trainkit/run": (20, 5_576),
    "trainkit/slurm": (8, 1_663),
    "trainkit/trainer": (55, 12_816),
    "tests": (406, 68_916),
}
"""Maps a folder to its number of Python files and lines.

A change may lower the numbers, and needs a reason to raise them.
"""
SLACK = (2, 100)
"""The difference in files and lines at which `SIZES` must be lowered."""

BASE = {
    **dict.fromkeys(("__init__", "errors", "locks", "terminal", "extras"), ""),
    **{
        "capability": "errors",
        "shipped": "capability errors",
        "folders": "errors",
        "trust": "errors folders",
    },
    "formats": "terminal",
}
"""Maps a module that all others may import to its own imports."""
OF_CAPABILITIES = {"run", "config", "plan", "cli"}
"""Packages that every capability may import."""
ABOVE = {
    # These modules decide what is requested and what will run.
    "config": "",
    "data": "config.training run",
    "quoting": "",
    "scheduler": "",
    "slurm": "scheduler",
    "run": "config.yamlfile scheduler slurm",
    "cluster": "config run scheduler slurm",
    "plan": "backend cluster config data.checks run",
    # These modules run inside the allocation, and everything about one scheduler is in its backend.
    "backend": "run",
    "job": "backend cluster.bad_nodes cluster.machine config plan run scheduler slurm",
    "backends": "backend cluster config job plan quoting run scheduler slurm",
    # These modules start a run, show a run, and act on an existing run.
    "launch": (
        "backend backends cluster config data.checks function job.processes observe.current observe.group "
        "observe.status plan quoting run scheduler slurm"
    ),
    "observe": "backend backends config function plan run scheduler slurm",
    "control": (
        "backend backends cluster config data.checks function launch observe.group plan run scheduler slurm"
    ),
    # A user's task and loop use these modules. Only the trainer imports torch.
    "safetensors": "",
    "adapters": "config",
    "task": "adapters config data.shards safetensors",
    "trainer": "adapters cluster.machine config data job.rank_env job.signals plan run safetensors task",
    "loop": "config data.order job.rank_env job.signals plan run trainer",
    # Commands and the Python API.
    "__main__": "cli",
    "cli": "backend backends cluster config control data job launch observe plan run scheduler slurm",
    "function": "run",
    "arguments": "function",
    "api": "arguments backend backends config control function launch observe plan run",
    # The core imports no capability.
    "capabilities": "",
    "capabilities.doctor": (
        "cluster job.node job.preflight job.processes job.rank_env job.signals launch.config_request "
        "launch.environment launch.packages scheduler slurm"
    ),
    "capabilities.drill": "backend backends control job launch observe scheduler slurm",
    "capabilities.evaluations": "job.processes job.signals plan quoting scheduler slurm",
    "capabilities.export": (
        "adapters capabilities.ema capabilities.transformers data job.processes plan.model_shape safetensors "
        "trainer"
    ),
    "capabilities.generate": (
        "capabilities.export capabilities.texts data job.processes plan.model_shape trainer"
    ),
    "capabilities.multimodal": (
        "adapters capabilities.texts capabilities.transformers data safetensors task trainer"
    ),
    "capabilities.transformers": "adapters data.sources safetensors task trainer",
    "capabilities.simulation": (
        "cluster data.checks job.processes launch.config_request launch.trainer_process trainer"
    ),
    "capabilities.task_check": "data.dataset_file plan.launch run.manifest task trainer",
    "capabilities.texts": "data launch.trainer_process",
    "capabilities.ema": "trainer",
    "capabilities.replicas": "trainer",
    "capabilities.spike": "",
    "capabilities.average": "capabilities.export job.processes trainer",
    "capabilities.replay": "capabilities.texts cluster control data job launch trainer",
    "capabilities.init": "cluster",
    "capabilities.shell": "backend cluster launch scheduler slurm",
    "capabilities.stacks": "backends.jobs job.failure.stacks",
    "capabilities.diagnose": "backend backends job.failure.launcher_report observe scheduler slurm",
    "capabilities.programs": "backends.jobs observe",
    "capabilities.watch": "backend backends capabilities.diagnose control observe scheduler",
    "capabilities.report": "capabilities.watch.view_text observe",
    "capabilities.bench": (
        "backend backends capabilities.layouts capabilities.report cluster control launch observe"
    ),
    "capabilities.debugger": "capabilities.shell capabilities.stacks launch.packages",
    "capabilities.layouts": "cluster data.checks launch.config_request",
    "capabilities.growth": (
        "backends.slurm.queue_estimate cluster job.attempt_end job.decision job.processes "
        "launch.gpu_hours launch.plan_run slurm"
    ),
    "capabilities.launchers": "job.node.worker_env job.rank_env",
    "capabilities.curves": "job.node job.processes",
    "capabilities.health": "cluster.machine job.node job.preflight job.processes job.rank_env",
    "capabilities.trackers": "capabilities.media job.node job.processes",
    "capabilities.media": "trainer",
    "capabilities.notifications": "capabilities.slow_ranks.output_watch job.attempt_end job.processes",
    "capabilities.slow_ranks": "job.attempt_end job.decision job.failure job.hangs job.processes",
}
"""Maps a package or module to what it may import in addition to itself and `BASE`."""


def allowed_for(part: str) -> set[str]:
    if part in BASE:
        return {part, *BASE[part].split()}
    own = OF_CAPABILITIES if part.startswith("capabilities.") else set()
    return {part, *ABOVE[part].split(), *BASE, *own}


CONTRACTS = {PACKAGE / "capability.py", PACKAGE / "shipped.py", PACKAGE / "backend.py"}
"""Files whose methods have types of higher layers, imported under TYPE_CHECKING."""


@dataclass(frozen=True)
class Import:
    """One imported module, by its dotted name, and the place of the import."""

    module: str
    place: str


@cache
def files() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(text_of(path), str(path))))


def part_of(path: Path) -> str:
    """Return the package of a file, or its module next to the packages.

    A file of a capability belongs to its folder.
    """
    first, *rest = path.relative_to(PACKAGE).with_suffix("").parts
    return f"{first}.{rest[0]}" if first == "capabilities" and len(rest) > 1 else first


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Return everything that a file imports, also inside functions and for type checkers."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[Import]:
    typed = [
        inner
        for node in (nodes_of(path) if path in CONTRACTS else ())
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    ]
    for node in nodes_of(path):
        if not isinstance(node, ast.Import | ast.ImportFrom) or node in typed:
            continue
        place = f"{path.relative_to(ROOT)}:{node.lineno}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, place)
        else:
            assert node.level == 0, f"{place}: relative import"
            assert node.module is not None
            for alias in node.names:
                # `from trainkit.run import record` imports a module, `from trainkit.task import Task` a name.
                name = f"{node.module}.{alias.name}"
                is_module = (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
                is_package = (ROOT / name.replace(".", "/")).is_dir()
                yield Import(name if is_module or is_package else node.module, place)


def test_imports_follow_the_arrows() -> None:
    crossing = []
    for path in files():
        allowed = tuple(f"trainkit.{name}." for name in allowed_for(part_of(path)))
        own = (item for item in imports_of(path) if item.module.startswith("trainkit."))
        crossing += [item for item in own if not f"{item.module}.".startswith(allowed)]
    assert crossing == []


def refuse_circle(arrows: Mapping[str, Mapping[str, str]]) -> None:
    """Fail if imports form a circle. `arrows` maps an importer to its imports and their places."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        way = pairwise(error.args[1][::-1])
        pytest.fail("\n".join(f"{one} imports {other}: {arrows[one][other]}" for one, other in way))


def arrows_in(folder: Path) -> dict[str, dict[str, str]]:
    """Return which files and sub-folders of a folder import which others of the same folder."""
    prefix = ".".join(folder.relative_to(ROOT).parts) + "."
    arrows: dict[str, dict[str, str]] = {}
    for path in folder.rglob("*.py"):
        importer = path.relative_to(folder).parts[0].removesuffix(".py")
        names = [item for item in imports_of(path) if f"{item.module}.".startswith(prefix)]
        found = {item.module[len(prefix) :].partition(".")[0] or "__init__": item.place for item in names}
        arrows.setdefault(importer, {}).update((name, found[name]) for name in found if name != importer)
    return arrows


def test_arrows_lead_one_way() -> None:
    """A package must not be imported by the packages that it imports."""
    parts = {part: {name.partition(".")[0] for name in allowed_for(part)} for part in (*BASE, *ABOVE)}
    refuse_circle({part: dict.fromkeys(names - {part}, "ABOVE") for part, names in parts.items()})


def test_no_imports_lead_in_a_circle() -> None:
    """No circle may exist between files, or from a sub-folder to an outside file and back."""
    for folder in {path.parent for path in files()}:
        refuse_circle(arrows_in(folder))


WORKERS = {
    PACKAGE / "capabilities" / name
    for name in (
        "average/worker.py",
        "doctor/bandwidth.py",
        "ema/average.py",
        "export/worker.py",
        "generate/worker.py",
        "media/recorder.py",
        "media/staging.py",
        "multimodal/task.py",
        "replay/worker.py",
        "replay/items.py",
        "replicas/compare.py",
        "simulation/worker.py",
        "task_check/two_ranks.py",
        "task_check/worker.py",
        "trackers/board.py",
        "transformers/task.py",
    )
}
"""Modules that run in a separate process, like the trainer."""


def test_only_the_trainer_imports_torch() -> None:
    found = [
        item.place
        for path in files()
        if part_of(path) not in ("trainer", "task", "loop", "safetensors", "adapters") and path not in WORKERS
        for item in imports_of(path)
        if f"{item.module}.".startswith(("torch.", "torchvision.", "tensorboard.", "trainkit.trainer."))
    ]
    assert found == []


def test_no_module_is_a_drawer_for_everything() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [str(path) for path in files() if drawers & {path.stem, *path.relative_to(ROOT).parts}] == []


def budget_of(path: Path) -> str:
    """Return the folder of `SIZES` that counts a file."""
    top, *rest = path.parent.relative_to(ROOT).parts
    depth = 0 if top == "tests" else 2 if rest[:1] == ["capabilities"] else 1
    return "/".join([top, *rest[:depth]])


def test_every_folder_has_a_budget() -> None:
    assert SIZES.keys() == {"tests", *map(budget_of, files())}


@pytest.mark.parametrize("folder", SIZES)
def test_the_code_does_not_grow(folder: str) -> None:
    own = (path for path in (ROOT / folder).rglob("*.py") if budget_of(path) == folder)
    code = [text_of(path) for path in own]
    found = (len(code), sum(text.count("\n") for text in code))
    assert all(map(le, found, SIZES[folder])), f"{found}: remove as much, or raise SIZES and say why"
    assert all(map(ge, map(add, found, SLACK), SIZES[folder])), f"{found}: lower SIZES"


SPREAD = {
    # The pattern has the capability's keys, section and folder, because torch has a memory tracker, and other
    # programs have a wandb/.
    r"trackers|logging\.(mlflow|wandb)|MlflowConfig|WandbConfig": 2,
    "notification|notifier|NotifyPolicy": 1,
    "health": 2,
    "slow_rank|slow rank|straggler": 2,
    "log_curve|printed_curve|log_pattern": 2,
    r"\bgrowth\b|\.grow\b|\"grow\"|GrowthWatch": 1,
    "launcher_files|LauncherInput|LauncherPlan": 1,
    "multimodal": 1,
    r"\bema\b|EmaConfig|EmaPlan": 4,
    r"replica_differs|ReplicasConfig|ReplicasPlan|ReplicaComparison": 3,
    r"evaluations_plan|EvaluationsPlan|\bon_checkpoint\b|OnCheckpointConfig": 4,
    r"train\.spike|SpikeConfig|SpikePlan|loss_spike": 2,
    # A process that is stopped "by a debugger" may be in any debugger, such as gdb.
    "(?<!by a )debugger|debugged|rank_debug|DebugPlan|post.mortem": 2,
}
"""Maps the words of a capability to the number of core files that may contain one of them. The goal is 2."""


@pytest.mark.parametrize("words", SPREAD)
def test_the_core_does_not_know_a_capability(words: str) -> None:
    """A change may lower a number. A new row is the first step of a new capability."""
    word = re.compile(words, re.IGNORECASE)
    core = (path for path in files() if not path.is_relative_to(PACKAGE / "capabilities"))
    naming = [str(path.relative_to(ROOT)) for path in core if word.search(text_of(path))]
    assert len(naming) == SPREAD[words], naming


KNOWS_SLURM = {"trainkit[.]slurm[. ]": 15, "plan[.]slurm": 5}
"""Maps a pattern to the number of files that contain it outside Slurm's folders. The goals are 15 and 5."""


@pytest.mark.parametrize("pattern", KNOWS_SLURM)
def test_a_scheduler_is_one_folder(pattern: str) -> None:
    """The core calls a scheduler only through methods of `trainkit.backend.Backend`."""
    own = (PACKAGE / "slurm", PACKAGE / "backends" / "slurm")
    others = (path for path in files() if not any(path.is_relative_to(folder) for folder in own))
    naming = [str(path.relative_to(ROOT)) for path in others if re.search(pattern, text_of(path))]
    assert len(naming) == KNOWS_SLURM[pattern], naming


def test_folders_are_made_by_one_function() -> None:
    """`exist_ok` trusts the cache of a file system's client, and fails on a parallel file system."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files()
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and any(word.arg == "exist_ok" for word in node.keywords)
    ]
    assert found == [], "use trainkit.folders.ensure_folder"


def test_an_error_says_what_to_do() -> None:
    """Every refusal of a command has a hint. Errors of a job, a rank and Slurm get a diagnosis instead."""
    place_of_hint = {"UsageError": 2, "Problem": 4}
    found = []
    for path in files():
        if part_of(path) in ("job", "slurm", "trainer", "capabilities.task_check"):
            continue
        for node in nodes_of(path):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            place = place_of_hint.get(node.func.id, 0)
            is_whole = len(node.args) >= place or any(isinstance(arg, ast.Starred) for arg in node.args)
            if not is_whole and not any(keyword.arg == "hint" for keyword in node.keywords):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(found) == 1, found  # "and 3 more problems" has no hint


def test_every_package_is_shipped() -> None:
    """setup.cfg lists the packages one by one, because some of them are outside trainkit/."""
    setup = setup_cfg()
    listed = set(setup["options"]["packages"].split())
    found = {".".join(path.relative_to(ROOT).parent.parts) for path in files()}
    outside = {"hydra_plugins", "trainkit._shipped.configs", "trainkit._shipped.templates"}
    assert listed == found | outside


def test_the_lock_has_every_package_that_the_package_needs() -> None:
    """Each package has a hash and no named source, all are allowed, and torch has the installed version."""
    setup = setup_cfg()
    text = (ROOT / "requirements-lock.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pins = [re.fullmatch(r"([\w.-]+)==([\w.+]+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    versions = {canonicalize_name(pin[1]): pin[2] for pin in pins if pin is not None}
    assert len(versions) == len(lines)
    assert f"\ntorch=={pinned('constraints.txt')}" in text
    wanted = setup["options"]["install_requires"].split("\n")[1:]
    for extra in ("tensorboard", "watch"):
        wanted += setup["options.extras_require"][extra].split("\n")[1:]
    seen = set[str]()
    while wanted:
        item = Requirement(wanted.pop())
        name = canonicalize_name(item.name)
        if name in seen or (item.marker is not None and not item.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        assert item.specifier.contains(versions[name], prereleases=True), f"`make lock`: {item}"
        # The lock does not contain the additional packages of a torch with CUDA.
        wanted += [] if name == "torch" else requires(name) or []
    assert seen <= versions.keys()


def pinned(file: str) -> str:
    lines = (ROOT / file).read_text().splitlines()
    [pin] = [line.removeprefix("torch==") for line in lines if line.startswith("torch==")]
    assert all(line.startswith(("#", "torch==")) for line in lines)
    return pin


def test_torch_is_pinned_to_a_version_that_the_package_allows() -> None:

    setup = setup_cfg()
    wanted = map(Requirement, setup["options"]["install_requires"].split("\n")[1:])
    specifier = next(item.specifier for item in wanted if item.name == "torch")

    assert pinned("constraints.txt") == "2.13.0"
    assert "2.13.0" in specifier
    oldest = ".".join(map(str, OLDEST))
    assert f">={oldest}" in map(str, specifier)
    assert Requirement(REQUIREMENT).specifier == specifier
    assert pinned("constraints-oldest.txt") == f"{oldest}.0"
    major, minor, _ = pinned("constraints-newest.txt").split(".")
    assert f"<{major}.{int(minor) + 1}" in map(str, specifier)
