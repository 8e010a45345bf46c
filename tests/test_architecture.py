"""Checks the shape of the code in its syntax trees: the allowed imports, and the rules for every module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from configparser import ConfigParser
from dataclasses import dataclass, fields
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from operator import add, ge, le
from pathlib import Path

import pytest

from trainkit.capabilities.watch.run_view import RunView
from trainkit.job.decision import Outcome
from trainkit.observe.status import RunStatus
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.torch_build import OLDEST, REQUIREMENT
from trainkit.run.history import Attempt

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trainkit"
SIZES = {
    "trainkit": (21, 6_178),
    "trainkit/backends": (21, 4_633),
    "trainkit/capabilities": (1, 1),
    "trainkit/capabilities/bench": (6, 1_460),
    "trainkit/capabilities/curves": (4, 1_089),
    "trainkit/capabilities/debugger": (5, 663),
    "trainkit/capabilities/diagnose": (7, 1_465),
    "trainkit/capabilities/doctor": (6, 1_427),
    "trainkit/capabilities/drill": (5, 1_138),
    "trainkit/capabilities/export": (3, 425),
    "trainkit/capabilities/generate": (3, 316),
    "trainkit/capabilities/growth": (3, 702),
    "trainkit/capabilities/health": (4, 527),
    "trainkit/capabilities/init": (3, 354),
    "trainkit/capabilities/launchers": (4, 513),
    "trainkit/capabilities/layouts": (5, 928),
    "trainkit/capabilities/media": (6, 626),
    "trainkit/capabilities/multimodal": (2, 564),
    "trainkit/capabilities/notifications": (5, 526),
    "trainkit/capabilities/programs": (5, 529),
    "trainkit/capabilities/replay": (7, 1_634),
    "trainkit/capabilities/report": (13, 3_651),
    "trainkit/capabilities/shell": (3, 195),
    "trainkit/capabilities/simulation": (4, 323),
    "trainkit/capabilities/slow_ranks": (8, 735),
    "trainkit/capabilities/stacks": (2, 144),
    "trainkit/capabilities/task_check": (3, 425),
    "trainkit/capabilities/texts": (9, 1_866),
    "trainkit/capabilities/trackers": (6, 1_102),
    "trainkit/capabilities/transformers": (2, 306),
    "trainkit/capabilities/watch": (5, 1_365),
    "trainkit/cli": (17, 4_178),
    "trainkit/cluster": (9, 1_960),
    "trainkit/config": (13, 3_377),
    "trainkit/control": (5, 849),
    "trainkit/data": (6, 919),
    "trainkit/job": (30, 7_050),
    "trainkit/launch": (18, 3_998),
    "trainkit/observe": (8, 1_876),
    "trainkit/plan": (16, 3_355),
    "trainkit/run": (17, 5_134),
    "trainkit/slurm": (8, 1_663),
    "trainkit/trainer": (38, 9_842),
    "tests": (403, 66_374),
}
"""Maps a folder to its number of Python files and lines.

A change may lower the numbers, and needs a reason to raise them.
"""
SLACK = (2, 100)
"""The difference in files and lines at which `SIZES` must be lowered."""

ALLOWED = {
    # Every module may import these.
    "__init__": set(),  # has the version, and imports the Python API by name when it is first used
    "errors": set(),
    "capability": {"errors"},  # imports the types of its contract for type checkers only
    "shipped": {"capability", "errors"},
    "backend": {"errors", "run"},  # imports the types of its contract for type checkers only
    "folders": {"errors"},
    "trust": {"errors", "folders"},
    "locks": set(),
    "terminal": set(),
    "formats": {"terminal"},
    "extras": set(),
    # These modules decide what is requested and what will run, without side effects.
    "config": {"capability", "shipped", "errors", "folders", "formats", "trust"},
    "data": {"capability", "shipped", "errors", "folders", "formats", "run", "config.training"},
    "quoting": {"errors"},
    "scheduler": {"errors"},
    "slurm": {"errors", "scheduler"},
    # The folder of a run: its paths, its records, and the formats of its files.
    "run": {
        *("capability", "shipped", "errors", "folders", "formats", "locks", "scheduler", "slurm", "trust"),
        "config.yamlfile",
    },
    "cluster": {"errors", "folders", "locks", "run", "formats", "config", "scheduler", "slurm"},
    "plan": {
        "capability",
        "shipped",
        "backend",
        "errors",
        "run",
        "formats",
        "config",
        "cluster",
        "data.checks",
    },
    # These modules run inside the allocation.
    "job": {
        *(
            "capability",
            "shipped",
            "backend",
            "errors",
            "folders",
            "formats",
            "locks",
            "run",
            "config",
            "plan",
        ),
        *("scheduler", "slurm", "trust", "cluster.bad_nodes"),
        "cluster.machine",  # the driver and cores of the machine
    },
    # Everything about one scheduler, or about one machine, is in its backend.
    "backends": {
        *(
            "backend",
            "capability",
            "shipped",
            "errors",
            "folders",
            "formats",
            "locks",
            "run",
            "plan",
            "quoting",
        ),
        *("scheduler", "slurm"),
        *("trust", "job"),
        *("config", "cluster"),  # the drafts plan a run from these
    },
    # These modules start a run.
    "launch": {
        *("capability", "shipped", "extras", "errors", "folders", "locks", "run", "formats"),
        *("config", "cluster", "plan", "quoting", "scheduler", "slurm", "backend", "backends"),
        "data.checks",  # the facts about the data before a plan is made
        "job.processes",
        # `--after` waits for the states that `status` shows
        *("observe.group", "observe.status", "observe.current"),
        "function",  # runs of functions are not repeated
    },
    "observe": {
        *("capability", "shipped", "errors", "run", "formats", "config", "plan", "scheduler", "slurm"),
        *("backend", "backends"),  # how jobs of runs are submitted and queried
        "function",  # the command line of a function is not the requested one
        "terminal",  # the characters that may be shown
    },
    # These modules act on an existing run.
    "control": {
        *(
            "capability",
            "shipped",
            "errors",
            "folders",
            "formats",
            "run",
            "config",
            "cluster",
            "plan",
            "scheduler",
        ),
        *("slurm", "backend", "backends", "launch"),
        "data.checks",  # a resume compares the size of the vocabulary
        "observe.group",  # `cancel` acts on the states that `status` shows
        "function",  # finished runs of functions are called again
    },
    # A user's task is a subclass of these public classes of the trainer.
    "safetensors": {"errors"},
    "adapters": {"extras", "errors", "config", "formats"},
    "task": {"errors", "capability", "config", "data.shards", "safetensors", "adapters"},
    # Only the trainer imports torch. The trainer is named in argv and never imported.
    "trainer": {
        *(
            "extras",
            "errors",
            "folders",
            "formats",
            "run",
            "config",
            "data",
            "plan",
            "task",
            "safetensors",
            "adapters",
        ),
        "capability",
        "shipped",  # the folder of a shipped task
        *("job.signals", "job.rank_env"),
        "cluster.machine",  # the version of the machine's driver
    },
    # The other public interface of the trainer is for loops of the user.
    "loop": {
        *("errors", "folders", "run", "plan", "data.order", "job.signals", "job.rank_env", "trainer"),
        *("capability", "shipped", "config"),  # where its images are stored, and whether TensorBoard is on
    },
    "cli": {
        "terminal",
        *("capability", "shipped", "extras", "errors", "run", "config", "data", "cluster", "plan"),
        *("scheduler", "slurm", "job", "backend", "backends", "control", "launch", "observe"),
        *("formats", "folders", "locks", "trust"),
    },
    # Runs from Python do the same as the commands in a shell.
    "function": {"errors", "folders", "run"},
    "arguments": {"errors", "formats", "function"},
    "api": {
        "arguments",
        *("errors", "formats", "run", "config", "plan", "backend", "backends", "control", "observe"),
        *("launch", "function", "shipped"),
    },
    # No run needs these commands and tasks, so the core only names their modules and imports none of them.
    "capabilities.doctor": {  # checks machines before there is a run
        *("errors", "formats", "run", "config", "cluster", "plan", "scheduler", "slurm", "cli"),
        *("job.node", "job.preflight", "job.rank_env", "job.processes", "job.signals"),
        *("launch.environment", "launch.packages", "launch.config_request"),
    },
    "capabilities.drill": {  # interrupts runs on purpose, as their owner could by hand
        *("errors", "run", "formats", "config", "plan", "scheduler", "slurm", "cli"),
        *("job", "backend", "backends", "control", "launch", "observe"),
    },
    "capabilities.export": {  # writes the model of a checkpoint for other programs
        *("adapters", "errors", "folders", "formats", "run", "config", "data", "plan.model_shape", "cli"),
        *("job.processes", "safetensors", "trainer", "capabilities.transformers"),
    },
    "capabilities.generate": {
        *(
            "capabilities.export",
            "capabilities.texts",
            "errors",
            "formats",
            "run",
            "config",
            "data",
            "plan.model_shape",
            "cli",
            "job.processes",
            "trainer",
        ),
    },
    "capabilities.multimodal": {
        *("errors", "formats", "config", "data", "plan", "task", "adapters", "safetensors", "trainer"),
        *("capabilities.texts", "capabilities.transformers"),
    },
    "capabilities.transformers": {
        *("adapters", "errors", "formats", "config", "data.sources", "task", "safetensors", "trainer"),
    },
    "capabilities.simulation": {  # runs a rank without the others, in a separate process
        *("errors", "formats", "run", "config", "data.checks", "cluster", "plan", "cli", "job.processes"),
        *("launch.config_request", "launch.trainer_process", "trainer"),
    },
    "capabilities.task_check": {
        *("config", "data.dataset_file", "errors", "plan.launch", "run.manifest", "task", "trainer"),
    },
    "capabilities.texts": {
        *(
            "capability",
            "shipped",
            "extras",
            "errors",
            "folders",
            "formats",
            "locks",
            "run",
            "config",
            "data",
            "cli",
        ),
        "launch.trainer_process",  # `data validate` checks a user's task
    },
    "capabilities.replay": {  # starts ranks as the job does, in a separate folder
        *(
            "capability",
            "shipped",
            "errors",
            "folders",
            "run",
            "formats",
            "config",
            "data",
            "cluster",
            "plan",
            "job",
        ),
        *("control", "launch", "cli", "trainer", "capabilities.texts"),
    },
    "capabilities.init": {"errors", "folders", "formats", "config", "cluster", "cli"},
    "capabilities.shell": {
        *("errors", "folders", "run", "config", "cluster", "plan", "scheduler", "slurm", "backend", "launch"),
        "cli",
    },
    # These commands show runs.
    "capabilities.stacks": {
        *("errors", "folders", "formats", "run", "plan", "backends.jobs", "job.failure.stacks", "cli"),
    },
    "capabilities.diagnose": {
        *(
            "capability",
            "shipped",
            "errors",
            "folders",
            "formats",
            "terminal",
            "run",
            "config",
            "scheduler",
            "slurm",
            "backend",
        ),
        *("backends", "observe", "cli", "job.failure.launcher_report"),
    },
    "capabilities.programs": {  # waits for runs, and describes the output of commands
        *("errors", "formats", "run", "config", "shipped", "backends.jobs", "observe", "cli"),
    },
    "capabilities.watch": {
        *(
            "capability",
            "shipped",
            "errors",
            "extras",
            "folders",
            "formats",
            "terminal",
            "run",
            "scheduler",
            "backend",
            "backends",
        ),
        *("control", "observe", "cli", "capabilities.diagnose"),
    },
    "capabilities.report": {
        *(
            "capability",
            "shipped",
            "errors",
            "extras",
            "folders",
            "formats",
            "terminal",
            "run",
            "config",
            "observe",
            "cli",
        ),
        "capabilities.watch.view_text",  # a curve as a line of text
    },
    # runs a config in several variants, as its owner could by hand, and compares them
    "capabilities.bench": {
        *(
            "capability",
            "shipped",
            "extras",
            "errors",
            "folders",
            "run",
            "formats",
            "config",
            "cluster",
            "plan",
        ),
        *("backend", "backends", "control", "launch", "observe", "cli"),
        *("capabilities.layouts", "capabilities.report"),
    },
    "capabilities.debugger": {
        *("capability", "shipped", "errors", "folders", "formats", "run", "plan", "cli"),
        *("launch.packages", "capabilities.shell", "capabilities.stacks"),
    },
    "capabilities.layouts": {  # compares possible layouts, without a run
        *("errors", "formats", "config", "cluster", "plan", "data.checks", "cli", "launch.config_request"),
    },
    "capabilities.growth": {
        *("capability", "shipped", "errors", "formats", "run", "config", "cluster", "plan", "slurm"),
        *("job.attempt_end", "job.decision", "job.processes"),
        "backends.slurm.queue_estimate",  # how soon Slurm would start other requests
        *("launch.gpu_hours", "launch.plan_run"),
    },
    "capabilities.launchers": {
        *("capability", "shipped", "errors", "formats", "run", "config", "plan"),
        *("job.node.worker_env", "job.rank_env"),
    },
    # Companions run next to the ranks, and watches run in the supervisor.
    "capabilities.curves": {"capability", "shipped", "run", "config", "plan", "job.node", "job.processes"},
    "capabilities.health": {
        *("capability", "shipped", "cluster.machine", "config", "folders", "run", "plan"),
        *("job.node", "job.preflight", "job.processes", "job.rank_env"),
    },
    "capabilities.trackers": {
        *(
            "extras",
            "errors",
            "folders",
            "formats",
            "locks",
            "run",
            "config",
            "cli",
            "plan",
            "capability",
            "shipped",
        ),
        *("job.node", "job.processes", "capabilities.media"),
    },
    "capabilities.media": {  # its recorder runs in the ranks
        *("capability", "errors", "folders", "formats", "run", "trainer"),
    },
    "capabilities.notifications": {
        *("capability", "shipped", "errors", "folders", "formats", "run", "config", "plan", "cli"),
        *("job.attempt_end", "job.processes", "capabilities.slow_ranks.output_watch"),
    },
    "capabilities.slow_ranks": {
        *("capability", "shipped", "errors", "folders", "run", "config", "plan"),
        *("job.attempt_end", "job.decision", "job.failure", "job.hangs", "job.processes"),
    },
    "capabilities": set(),
    "__main__": {"cli"},
}
"""Maps a package or module of trainkit to its allowed imports.

Every module may also import itself and the version.
"""


CONTRACTS = {PACKAGE / "capability.py", PACKAGE / "shipped.py", PACKAGE / "backend.py"}
"""Files whose methods have types of higher layers, imported under TYPE_CHECKING."""


@dataclass(frozen=True)
class Import:
    """One imported module, by its dotted name, and the place of the import."""

    module: str
    place: str


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


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
        for node in tree_of(path).body
        if path in CONTRACTS and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    ]
    for node in ast.walk(tree_of(path)):
        if node in typed:
            continue
        place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, place)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place}: relative import"
            assert node.module is not None
            for alias in node.names:
                # `from trainkit.run import record` imports a module, `from trainkit.task import Task` a name.
                name = f"{node.module}.{alias.name}"
                is_module = (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
                is_package = (ROOT / name.replace(".", "/")).is_dir()
                yield Import(name if is_module or is_package else node.module, place)


@pytest.mark.parametrize("part", sorted({part_of(path) for path in files()}))
def test_imports_follow_the_arrows(part: str) -> None:
    allowed = {f"trainkit.{name}" for name in ALLOWED[part] | {part}}
    crossing = [
        f"{item.place} imports {item.module}"
        for path in files()
        if part_of(path) == part
        for item in imports_of(path)
        if item.module.startswith("trainkit.")
        and not any(f"{item.module}.".startswith(f"{name}.") for name in allowed)
    ]
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
    parts = {part: [name.partition(".")[0] for name in names] for part, names in ALLOWED.items()}
    refuse_circle({part: dict.fromkeys(names, "ALLOWED") for part, names in parts.items()})


@pytest.mark.parametrize("folder", sorted({path.parent for path in files()}), ids=lambda path: path.name)
def test_no_imports_lead_in_a_circle(folder: Path) -> None:
    """No circle may exist between files, or from a sub-folder to an outside file and back."""
    refuse_circle(arrows_in(folder))


WORKERS = {
    PACKAGE / "capabilities" / name
    for name in (
        "doctor/bandwidth.py",
        "export/worker.py",
        "generate/worker.py",
        "media/recorder.py",
        "media/staging.py",
        "multimodal/task.py",
        "replay/worker.py",
        "replay/items.py",
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
    code = [path.read_text(encoding="utf-8") for path in own]
    found = (len(code), sum(text.count("\n") for text in code))
    assert all(map(le, found, SIZES[folder])), f"{found}: remove as much, or raise SIZES and say why"
    assert all(map(ge, map(add, found, SLACK), SIZES[folder])), f"{found}: lower SIZES"


READS = {"read_job": 30, "record_of": 5, "LaunchPlan.read": 10}
"""Maps a function that reads a record to its number of callers, because a read record should be passed on."""


@pytest.mark.parametrize("name", READS)
def test_what_was_read_is_passed_on(name: str) -> None:
    calls = [node for path in files() for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    count = sum(ast.unparse(node.func) == name for node in calls)
    assert count <= READS[name], f"{count} places: pass what the caller has read"


UNTYPED = {"objects": 73, "values": 291}
"""Counts annotations that allow any value: a `JsonObject` or a container of `Any`, and `Any` elsewhere."""


def annotations_of(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = [item.annotation for item in ast.walk(node.args) if isinstance(item, ast.arg)]
            yield from filter(None, [*own, node.returns])


def test_values_have_types() -> None:
    """Code that only passes a value on annotates it as `object`, so a reader must check its type."""
    found = {"objects": 0, "values": 0}
    for annotation in (one for path in files() for one in annotations_of(tree_of(path))):
        text = ast.unparse(annotation)
        if re.search(r"JsonObject|(dict|Mapping)\[\w+, Any\]|(list|Sequence|Iterable|Iterator)\[Any\]", text):
            found["objects"] += 1
        elif re.search(r"\bAny\b", text):
            found["values"] += 1
    assert found == UNTYPED


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
    # A process that is stopped "by a debugger" may be in any debugger, such as gdb.
    "(?<!by a )debugger|debugged|rank_debug|DebugPlan|post.mortem": 2,
}
"""Maps the words of a capability to the number of core files that may contain one of them. The goal is 2."""
PLAN_FIELDS = 22
"""The number of fields of `LaunchPlan`. Fields of a single capability belong in its section of the plan."""


@pytest.mark.parametrize("words", SPREAD)
def test_the_core_does_not_know_a_capability(words: str) -> None:
    """A change may lower a number. A new row is the first step of a new capability."""
    word = re.compile(words, re.IGNORECASE)
    core = (path for path in files() if not path.is_relative_to(PACKAGE / "capabilities"))
    naming = [str(path.relative_to(ROOT)) for path in core if word.search(path.read_text(encoding="utf-8"))]
    assert len(naming) == SPREAD[words], naming


KNOWS_SLURM = {"trainkit[.]slurm[. ]": 14, "plan[.]slurm": 5}
"""Maps a pattern to the number of files that contain it outside Slurm's folders. The goals are 15 and 5."""


@pytest.mark.parametrize("pattern", KNOWS_SLURM)
def test_a_scheduler_is_one_folder(pattern: str) -> None:
    """The core calls a scheduler only through methods of `trainkit.backend.Backend`."""
    own = (PACKAGE / "slurm", PACKAGE / "backends" / "slurm")
    others = (path for path in files() if not any(path.is_relative_to(folder) for folder in own))
    naming = [str(path.relative_to(ROOT)) for path in others if re.search(pattern, path.read_text())]
    assert len(naming) == KNOWS_SLURM[pattern], naming


SHOWN_FIELDS = {RunStatus: 19, Attempt: 25, RunView: 27}
"""Maps a record of a run's state to its number of fields.

Values of a single capability belong in its folder.
"""


def test_the_core_types_have_what_every_run_has() -> None:
    assert len(fields(LaunchPlan)) == PLAN_FIELDS
    assert {kind: len(fields(kind)) for kind in SHOWN_FIELDS} == SHOWN_FIELDS


def test_items_stand_where_they_belong() -> None:
    """A literal tuple is not unpacked where its items could be written directly."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List)
        if isinstance(node.ctx, ast.Load)
    ]
    assert found == []


def test_an_outcome_is_complete_when_it_is_made() -> None:
    """Every attempt has an outcome, and one file creates it after all its values are known."""

    def makes_one(node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            name, first = ast.unparse(node.func), ast.unparse(node.args[0]) if node.args else ""
            return name == "Outcome" or (name == "replace" and first.endswith("outcome"))
        return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_outcome(node.value)

    def is_outcome(value: ast.expr) -> bool:
        return ast.unparse(value).endswith("outcome")

    assert len(fields(Outcome)) <= 12
    making = {path for path in files() if any(map(makes_one, ast.walk(tree_of(path))))}
    assert making == {PACKAGE / "job" / "outcome.py"}


def test_folders_are_made_by_one_function() -> None:
    """`exist_ok` trusts the cache of a file system's client, and fails on a parallel file system."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files()
        for node in ast.walk(tree_of(path))
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
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            place = place_of_hint.get(node.func.id, 0)
            is_whole = len(node.args) >= place or any(isinstance(arg, ast.Starred) for arg in node.args)
            if not is_whole and not any(keyword.arg == "hint" for keyword in node.keywords):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(found) == 1, found  # "and 3 more problems" has no hint


def test_every_package_is_shipped() -> None:
    """setup.cfg lists the packages one by one, because some of them are outside trainkit/."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    found = {".".join(path.relative_to(ROOT).parent.parts) for path in files()}
    outside = {"hydra_plugins", "trainkit._shipped.configs", "trainkit._shipped.templates"}
    assert listed == found | outside


def test_the_lock_has_every_package_that_the_package_needs() -> None:
    """Each package has a hash and no named source, all are allowed, and torch has the installed version."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
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
    from packaging.requirements import Requirement

    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
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
