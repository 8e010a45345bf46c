"""Tests runs from Python: what `trainkit.submit` and similar functions start, return and raise."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.support.programs import wait_for
from tests.support.said import said
from trainkit import api
from trainkit.cli.status import trial_rows
from trainkit.errors import ConfigError, Problem, TrainkitError, UsageError
from trainkit.function import Call, Requeue, Result, by_value, dumps, read_pickle
from trainkit.launch.create import CreatedRun
from trainkit.launch.submission import Submission
from trainkit.observe.notebook import LEFT
from trainkit.run.files import read_json, write_atomic, write_json
from trainkit.run.group import GroupRecord, RunGroup, Trial
from trainkit.run.record import add_attempt, create_job
from trainkit.run.registry import register
from trainkit.run.rundir import RunDir, run_lock
from trainkit.run.trial import as_number, values_of

ROOT = Path(__file__).resolve().parents[1]
ONCE = {"max_crashes": 0}
LIMIT_S = 120.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with a separate list of runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ".state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def add(one: int, other: int = 1) -> tuple[int, str]:
    print("adds", one, other)
    return one + other, os.environ["RANK"]


def fail(what: str) -> None:
    raise LookupError(f"no {what}")


def late() -> None:
    raise TimeoutError("of the function")


def lose_a_peer() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    raise ConnectionError("rank 1 is gone")


def sleep_while(file: Path) -> str:
    for _ in range(400):
        if not file.exists():
            return "woken"
        time.sleep(0.05)
    return "slept"


class Counts:
    """Counts to a number. After a stop signal, it continues where it was."""

    def __init__(self) -> None:
        self.number, self.saved_at = 0, 0

    def __call__(self, upto: int, file: Path) -> tuple[int, int, str]:
        while self.number < upto or not file.exists():
            time.sleep(0.01)
            self.number += 1
        return self.number, self.saved_at, os.environ["TRAINKIT_JOB_ATTEMPT"]

    def checkpoint(self, upto: int, file: Path) -> Requeue:
        self.saved_at = self.number
        file.touch()
        return Requeue(self, self.saved_at, file)


class CountsInSubmitit(Counts):
    def __submitit_checkpoint__(self, upto: int, file: Path) -> Requeue:
        return super().checkpoint(upto, file)

    def checkpoint(self, upto: int, file: Path) -> Requeue:
        raise AssertionError("the other one is preferred")


def wait_until_running(run: api.Run) -> None:
    wait_for(lambda: list(run.path.glob("attempts/001/results")))
    time.sleep(0.5)  # the call begins within this time


def test_the_import_is_lazy() -> None:
    code = (
        "import sys; before = {*sys.modules}; import trainkit; new = {*sys.modules} - before;"
        "assert not {'click', 'pydantic', 'torch', 'yaml', 'asyncio'} & new, new;"
        "trainkit.Run; assert not {'asyncio', 'click', 'pydantic', 'torch', 'yaml'} & {*sys.modules};"
        "assert {'submit', 'Run', 'sweep'} < {*dir(trainkit)}"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'sumbit'"):
        trainkit.sumbit  # noqa: B018
    for name in trainkit.__all__:
        assert getattr(trainkit, name) is not None
    # A package trainkit.submit would replace the function of that name when a module of the package is
    # imported.
    parts = {file.parent.name for file in (ROOT / "trainkit").glob("*/__init__.py")}
    parts |= {file.stem for file in (ROOT / "trainkit").glob("*.py")}
    assert not parts & {*trainkit.__all__}


def test_a_pickle_of_others_is_not_loaded(folder: Path) -> None:
    file = folder / "call.pkl"
    write_atomic(file, dumps(Call(add, (1,))))
    assert (file.stat().st_mode & 0o777, read_pickle(file).args) == (0o600, (1,))
    link = folder / "link.pkl"
    link.symlink_to(file)
    with pytest.raises(OSError, match="symbolic links"):
        read_pickle(link)
    file.chmod(0o640)
    with pytest.raises(UsageError, match="is not loaded"):
        read_pickle(file)
    if os.geteuid() == 0:
        file.chmod(0o600)
        os.chown(file, 65534, 65534)
        with pytest.raises(UsageError, match="is not loaded"):
            read_pickle(file)


def test_a_module_goes_with_its_function_unless_the_job_has_it(folder: Path, monkeypatch) -> None:
    (folder / "at_hand.py").write_text("def f(): return 1\n")
    (folder / "lib").mkdir()
    (folder / "lib" / "elsewhere.py").write_text("def f(): return 1\n")
    monkeypatch.setattr(sys, "path", [str(folder), str(folder / "lib"), *sys.path])
    import at_hand  # type: ignore[import-not-found]
    import elsewhere  # type: ignore[import-not-found]

    found = {}
    for module in (at_hand, elsewhere):
        with by_value(module.f):
            write_atomic(folder / "f.pkl", dumps(module.f))
        found[module.__name__] = b"co_" in (folder / "f.pkl").read_bytes() or (
            str(folder / "lib").encode() in (folder / "f.pkl").read_bytes()
        )
    assert found == {"at_hand": False, "elsewhere": True}


def test_what_cannot_be_pickled_leaves_no_folder() -> None:
    with pytest.raises(TypeError, match="pickle"):
        api.submit(add, threading.Lock())
    with pytest.raises(TypeError, match="pickle"):
        api.map_array(add, [1, threading.Lock()])
    assert not Path("runs").exists()


REFUSED = """
submit()
submit("quickstart", train={"stepz": 5})
submit("quickstart", nodez=2)
submit("quickstart", gpus=2)
submit("quickstart", lr=2)
submit("quickstart", nam="a", qqqqq=1)
submit("quickstart", **{"train.steps": -1})
submit({"train": {"steps": "ten"}})
submit("quickstart", time="soon")
submit("no-such-config")
submit(3)
submit(Path("my dir/train.py"))
submit("train.py --lr=1 a.py")
"""


@pytest.mark.parametrize("call", REFUSED.split("\n")[1:-1])
def test_what_is_refused(call: str) -> None:
    with pytest.raises(UsageError) as error:
        eval(call, {"submit": api.submit, "Path": Path})
    said(error.value.render())
    assert not Path("runs").exists()


PROBLEMS: list[tuple[TrainkitError, str, str]] = [
    # Each case is an error, its text and its hint.
    (
        ConfigError([Problem("seed", "is odd", "x.yaml:3", "make it even")]),
        "x.yaml:3: seed: is odd",
        "make it even",
    ),
    (
        ConfigError([Problem("a", "x", hint="do 1"), Problem("b", "y"), Problem("c", "z", hint="do 2")]),
        "3 problems\n\na: x",
        "do 1\ndo 2",
    ),
    (ConfigError([Problem("a", "x", hint="do 1"), Problem("b", "y", hint="do 1")]), "2 problems", "do 1"),
    (ConfigError([Problem("a", "x")]), "a: x", ""),
    (ConfigError([]), "", ""),
    (UsageError("no such file", hint="name one"), "no such file", "name one"),
    (trainkit.SlurmError("no answer"), "no answer", ""),
    (trainkit.RunError("läuft nicht", hint="<b>\n{x}"), "läuft nicht", "<b>\n{x}"),
]


@pytest.mark.parametrize(("error", "text", "hint"), PROBLEMS, ids=str)
def test_every_error_has_its_hint(error: TrainkitError, text: str, hint: str) -> None:
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert str(one).startswith(text)
        assert one.hint == hint
        printed = "".join(traceback.format_exception(one))
        if sys.version_info >= (3, 11):
            assert all(line in printed for line in hint.splitlines())
            assert ("hint: " in printed) == bool(hint)
        assert one.render().count("hint: ") == printed.count("hint: ")


def test_a_config_in_python() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    options = {"train": {"steps": 9}, "nodes": 2, "tags": ("a",)}
    config = {"seed": 3, "train": {"steps": 7, "log_every": 1}, "launch": {"env": {"A": "1"}}}
    interpolated = {**config, "train": {"steps": "${seed}", "log_every": 1}}
    for given in (config, omegaconf.OmegaConf.create(interpolated)):
        flags = api._given(given, None, None, options).request.flags
        assert {key: value for key, (_, value) in flags.items()} == {
            **{"seed": 3, "train.log_every": 1, "launch.env": {"A": "1"}},
            **{"train.steps": 9, "resources.nodes": 2, "tags": ["a"]},
        }
    with pytest.raises(ConfigError, match="unknown key"):
        api.submit(omegaconf.OmegaConf.create({"trian": {"steps": 1}}))


def train(lr: float, *sizes: int, config: object = None, **more: object) -> None: ...


class Asked:
    """Has the attributes of a trial of Optuna."""

    number = 3

    def __init__(self, **params: object) -> None:
        self.params = params


@pytest.fixture
def is_never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(submission: Submission, created: CreatedRun, *, now: bool) -> None:
        if submission.array is None:
            created.run.attempt(1).create()

    monkeypatch.setattr("trainkit.launch.create.start_submission", start)


@pytest.mark.usefixtures("is_never_started")
@pytest.mark.parametrize(
    ("function", "args", "values"),
    [
        (train, (0.1,), {"lr": 0.1}),
        (train, (0.1, 64, 32), {"lr": 0.1, "sizes.0": 64, "sizes.1": 32}),
        (functools.partial(train, 0.1, seed=2), (), {"lr": 0.1, "seed": 2}),
        (functools.partial(train, config={"depth": 2}), ("1e-4",), {"lr": "1e-4", "config.depth": 2}),
        (train, (Asked(rate="1e-4", kind="b"),), {"rate": "1e-4", "kind": "b"}),
        (functools.partial(train, **Asked(lr=0.5, n=1).params), (), {"lr": 0.5, "n": 1}),
        (print, (3, 4), {"args.0": 3, "args.1": 4}),
        (
            functools.partial(train, 0.1, api_key="sk-abcdefghijklmnopqrstuv"),
            (),
            {"lr": 0.1, "api_key": "***"},
        ),
        (train, ("of a variable: 1234-5678-9",), {"lr": "***"}),
        (train, (float("nan"),), {"lr": "nan"}),
        (late, (), None),
    ],
)
def test_a_run_has_the_values_of_its_arguments(
    function: Any, args: tuple, values: dict | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "1234-5678-9")
    run = RunDir(api.submit(function, *args, name="one").path)
    assert values_of(run) == (values or {})
    assert run.values_file.exists() == (values is not None)


@pytest.mark.usefixtures("is_never_started")
@pytest.mark.parametrize(
    ("function", "items", "values"),
    [
        (train, [[0.1, 0.2]], [{"lr": 0.1}, {"lr": 0.2}]),
        (train, [[0.1, 0.2], [7, 7]], [{"lr": 0.1, "sizes.0": 7}, {"lr": 0.2, "sizes.0": 7}]),
        (functools.partial(train, 0.1), [[7, 8]], [{"sizes.0": 7}, {"sizes.0": 8}]),
        (functools.partial(train, seed=3, config="a"), [[0.1, 0.2]], [{"lr": 0.1}, {"lr": 0.2}]),
        (
            lambda config: None,
            [[{"lr": 0.1, "depth": 2}, {"lr": "1e-4", "depth": 2}]],
            [{"config.lr": 0.1}, {"config.lr": "1e-4"}],
        ),
        (train, [[Asked(a=1), Asked(a=2)]], [{"a": 1}, {"a": 2}]),
        (lambda call: call(), [[late, lose_a_peer]], [{"call": "late"}, {"call": "lose_a_peer"}]),
    ],
)
def test_a_group_has_the_values_of_its_items(function: Any, items: list, values: list[dict]) -> None:
    group = api.map_array(function, *items, name="many")
    status = group.status
    assert [trial.values for trial in status.trials] == [
        {key: as_number(value) for key, value in own.items()} for own in values
    ]
    assert status.keys == list(values[0])
    rows = trial_rows(status, status.trials)
    assert rows[1][2 : 2 + len(status.keys)] == [str(value) for value in values[0].values()]


def test_a_partial_is_called_as_its_function(folder: Path) -> None:
    counts = Counts()
    call = api._call(functools.partial(functools.partial(counts, 1), file=folder), (), {})
    assert (call.function, call.args, call.kwargs) == (counts, (1,), {"file": folder})


TYPED = """\
import functools
from pathlib import Path
import trainkit

def add(one: int, other: int = 1) -> int: return one
def many(text: str, *rest: str, upper: bool = False) -> list[float]: return []
def nothing() -> None: ...

class Counts:
    def __init__(self, start: int) -> None: ...
    def __call__(self, upto: int) -> bytes: return b""
    def method(self, x: float) -> complex: return 1j

async def wait(run: trainkit.Run[int]) -> None:
    reveal_type(await run)  #: int

def options(run: trainkit.Run, group: trainkit.Group) -> None:
    reveal_type(run.result())  #: Any
    reveal_type(group[0])  #: trainkit.api.Run[Any]

reveal_type(trainkit.submit(add, 1, 2).result())  #: int
reveal_type(trainkit.submit(add, 1, nodes=2).results())  #: list[int]
reveal_type(trainkit.submit(add, 1).wait().exception())  #: Exception | None
reveal_type(trainkit.submit(many, "a").result())  #: list[float]
reveal_type(trainkit.submit(many, "a", "b", "c").result())  #: list[float]
reveal_type(trainkit.submit(nothing))  #: trainkit.api.Run[None]
reveal_type(trainkit.submit(functools.partial(add, other=2), 1).result())  #: int
reveal_type(trainkit.submit(lambda x: str(x), 1).result())  #: str
reveal_type(trainkit.submit(Counts(1), 2).result())  #: bytes
reveal_type(trainkit.submit(Counts(1).method, 2).result())  #: complex
reveal_type(trainkit.submit(Counts, 1).result())  #: typed.Counts
reveal_type(trainkit.submit(len, "abc").result())  #: int
reveal_type(trainkit.submit(max, 1, 2).resume().result())  #: int
trained = trainkit.submit("quickstart", nodes=2, train={"steps": 3})
reveal_type(trained)  #: trainkit.api.Run[Never]
reveal_type(trainkit.submit({"seed": 1}).status.state)  #: str
later = trainkit.submit(command=["a", 0.1, Path("b")], launcher="torchrun", after=trained)
reveal_type(later)  #: trainkit.api.Run[Never]
reveal_type(trainkit.map_array(add, [1, 2]).results())  #: list[int]
reveal_type(trainkit.map_array(add, [1], [2])[0])  #: trainkit.api.Run[int]
reveal_type(trainkit.sweep(add, {"one": [1]}, limit=2)[:1])  #: list[trainkit.api.Run[int]]
reveal_type(trainkit.sweep("quickstart", {"seed": range(3)}))  #: trainkit.api.Group[Never]
reveal_type(next(trainkit.as_completed(trainkit.map_array(add, [1]))))  #: trainkit.api.Run[int]
reveal_type(next(trainkit.as_completed([trainkit.submit(add, 1)], 5)).result())  #: int
reveal_type(trainkit.Run("add"))  #: trainkit.api.Run[Any]
known: trainkit.Run[int] = trainkit.Run("add")
reveal_type(trainkit.Group("lr").wait())  #: trainkit.api.Group[Any]
reveal_type(trainkit.ConfigError([]).hint)  #: str
trainkit.map_array(add, [1], partitoin="gpu")  #: Unexpected keyword argument "partitoin" for "map_array"
trainkit.sweep("quickstart", {}, time=5)  #: Argument "time" to "sweep" has incompatible type "int"
trainkit.submit(add, "1")  #: Argument 1 to "submit" has incompatible type
trainkit.submit(add)  #: Argument 1 to "submit" has incompatible type
trainkit.submit(add, 1, 2, 3)  #: Argument 1 to "submit" has incompatible type
trainkit.submit(5)  #: Argument 1 to "submit" has incompatible type "int"
"""
"""Lines of code, each with the type checker's answer."""


@pytest.mark.slow(seconds=10)
def test_editors_and_type_checkers_know_types_and_options(folder: Path) -> None:
    (folder / "typed.py").write_text(TYPED)
    # The types of other packages do not matter here, and reading torch would take half a minute.
    options = ["--strict", "--follow-imports=silent", "--no-site-packages", "--ignore-missing-imports"]
    argv = [sys.executable, "-m", "mypy", *options, "typed.py"]
    checked = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT)})
    said = re.findall(r"typed.py:(\d+): (?:note: Revealed type is|error:) (.*)", checked.stdout)
    found = {int(line): text.strip('"').replace("builtins.", "") for line, text in said}
    lines = enumerate(TYPED.splitlines(), 1)
    expected = {number: line.partition("  #: ")[2] for number, line in lines if "  #: " in line}
    assert {line: found[line][: len(text)] for line, text in expected.items()} == expected
    assert found.keys() == expected.keys(), checked.stdout
    jedi = pytest.importorskip("jedi")
    for start in ("submit(print, gpus", "sweep('x', {}, gpus", "map_array(print, gpus"):
        names = jedi.Script(f"import trainkit\ntrainkit.{start}").complete()
        assert [name.name for name in names] == ["gpus_per_node="]


def test_a_name_of_several_runs_is_refused(folder: Path) -> None:
    for parent in ("one", "other"):
        run = RunDir(folder / parent / "same")
        run.attempts_dir.mkdir(parents=True)
        create_job(run, backend="local", name="same", cwd=str(folder), code=None)
        register(run, "same")
    for kind in (api.Run, api.Group):
        with pytest.raises(UsageError, match="2 runs are called same"):
            kind("same")


class Ends(api.Run[int]):
    """A run that has ended after it was polled a number of times."""

    def __init__(self, label: str, looks: float) -> None:
        self.label, self.looks = label, looks

    def _polls(self, ask: object = None) -> Iterator[float]:
        while self.looks:
            self.looks -= 1
            yield 0.001


@pytest.mark.parametrize(
    ("looks", "labels"),
    [
        ({}, []),
        ({"a": 0}, ["a"]),
        ({"late": 5, "soon": 1, "now": 0, "too": 1}, ["now", "soon", "too", "late"]),
        ({"now": 0, "never": math.inf}, ["now", "TimeoutError"]),
    ],
)
def test_runs_as_they_end(looks: dict[str, float], labels: list[str]) -> None:
    found = []
    try:
        for run in api.as_completed((Ends(*item) for item in looks.items()), 0.05):
            assert isinstance(run, Ends)
            found.append(run.label)
    except TimeoutError:
        found.append("TimeoutError")
    assert found == labels


def test_a_group_is_asked_once_a_round_and_no_faster_than_it_is_due(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    trials = [types.SimpleNamespace(index=index, state="pending", problem="") for index in range(5)]

    def query(group: RunGroup, *args: object, **kwargs: object) -> object:
        asked.append(group.path)
        return types.SimpleNamespace(trials=trials)

    write_json(folder / "sweep.json", GroupRecord(name="one").to_dict(map(Trial, range(5))))
    monkeypatch.setattr(api, "query_group", query)
    of_group = [api.Run(RunGroup(folder).run(index)) for index in range(5)]
    with pytest.raises(TimeoutError):
        list(api.as_completed([*of_group, Ends("quick", math.inf)], 0.1))
    assert len(asked) == 2, "at first, and when the time was over"


def plain(shown: Any) -> str:
    """Return a table without its styles."""
    return str(shown._repr_html_()).replace(LEFT, "")


def ended_run(folder: Path, content: bytes | None = None, state: str = "finished") -> api.Run[object]:
    """Return an ended run of a function whose rank 0 has left a file with this content."""
    run = RunDir(folder / "runs" / "made")
    run.path.mkdir(parents=True)
    attempt = run.attempt(1)
    attempt.create()
    create_job(run, backend="local", name="<made>", cwd=str(folder), code=None)
    with run_lock(run):
        add_attempt(run, 1, os.getpid(), "a test")
    write_json(attempt.end_file, {"state": state, "action": "stop", "exit_code": 0, "reason": None})
    if content is not None:
        attempt.rank_result(0).parent.mkdir(mode=0o700)
        write_atomic(attempt.rank_result(0), content)
    return api.Run(run)


class Broken:
    """A value that can be pickled but not loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return __import__, ("no_such_module_anywhere",)


@pytest.mark.parametrize(
    ("content", "state", "shown"),
    [
        (dumps(Result({"loss": 0.5})), "finished", "<td>{&#x27;loss&#x27;: 0.5}</td>"),
        (dumps(Result("<b>&")), "finished", "<td>&#x27;&lt;b&gt;&amp;&#x27;</td>"),
        (dumps(Result("hf_" + "a" * 30)), "finished", "<td>&#x27;***&#x27;</td>"),
        (dumps(Result(None)), "finished", "<td>None</td>"),
        (dumps(Result(bytes(2**20))), "finished", "<td>1.0 MiB; call result() to load it</td>"),
        (dumps(Result(Broken())), "finished", "<td>cannot be shown: the result of rank 0 of "),
        (b"", "finished", "<td>cannot be shown: "),
        (dumps(Result(3))[:-9], "finished", "<td>cannot be shown: "),
        (None, "finished", None),
        (dumps(Result(error=LookupError("x"), traceback="y")), "failed", None),
    ],
    ids=range(10),
)
def test_what_a_table_shows_of_a_result(
    folder: Path, content: bytes | None, state: str, shown: str | None
) -> None:
    table = plain(ended_run(folder, content, state))
    assert f"<th>state</th><td>{state}</td>" in table
    assert "<td>&lt;made&gt;</td>" in table
    assert (shown or "</table>") in table
    assert ("<th>result</th>" in table) == (shown is not None)


METRICS: list[tuple[str, str, bool]] = [
    # Each case has lines of metrics.jsonl, the content of the table, and whether the table has a curve.
    ("", "</table>", False),
    ('{"step": 1, "loss": 2.5}\n', "<td>2.5</td>", False),
    ('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 1.5}\n', "<td>1.5</td>", True),
    ('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": null}\n', "diverged since step 2", False),
    ('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 1e999}\n', "diverged since step 2", False),
    ('{"step": 1, "loss": 2.5}\n{"step": 2, "lo', "<td>2.5</td>", False),
    ('{"step": 1, "accuracy": 0.5}\n', "<td>1</td>", False),
    ("not json\n\x00\n[]\n{}\n", "</table>", False),
    ('{"step": -1, "loss": -2.5}\n{"step": 2, "loss": -3}\n', "<td>-3</td>", True),
    (
        "".join(f'{{"step": {step}, "loss": {1 / step}}}\n' for step in range(1, 5000)),
        "<td>0.0002</td>",
        True,
    ),
]


@pytest.mark.parametrize(("lines", "shown", "has_curve"), METRICS, ids=lambda value: str(value)[:30])
def test_what_a_table_shows_of_the_metrics(folder: Path, lines: str, shown: str, has_curve: bool) -> None:
    run = ended_run(folder)
    (run.path / "metrics.jsonl").write_text(lines)
    table = plain(run)
    assert shown in table
    assert ("<svg" in table) == has_curve
    assert len(table) < 5000


def test_a_table_says_what_cannot_be_read(folder: Path) -> None:
    run = ended_run(folder)
    shutil.rmtree(run.path)
    assert "incomplete" in plain(run)
    run.path.write_text("a file")
    assert "<th>error</th>" in plain(run)


def test_a_warning_names_the_line_of_the_caller() -> None:
    text = "notify.mail has no effect, because the run does not use Slurm"
    with pytest.warns(UserWarning, match=text) as caught:
        trainkit.submit(command=["true"], notify={"mail": "me@x.org"}, now=True).wait(LIMIT_S)
    assert {one.filename for one in caught if one.category is UserWarning} == {__file__}


@pytest.mark.slow(seconds=15)
@pytest.mark.smoke
def test_a_function(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = trainkit.submit(add, 1, 2, gpus_per_node=2, note="two ranks", tags=["sum"], device="cpu")
    assert (run.result(LIMIT_S), run.results()) == ((3, "0"), [(3, "0"), (3, "1")])
    assert (run.name, run.path, run.status.state, run.done()) == (
        "add",
        folder / "runs/add",
        "finished",
        True,
    )
    assert run.logs(1) == "adds 1 2\n"
    assert run.exception() is None
    table = plain(run)
    assert "<th>state</th><td>finished</td>" in table
    assert "<th>values</th><td>one=1, other=2</td>" in table
    assert "<th>result</th><td>(3, &#x27;0&#x27;)</td>" in table
    assert "<td>finished</td>" in plain(run.status)
    assert repr(run.status).startswith("<run add, state finished, ")
    assert api.Run("add").result() == (3, "0")
    assert [again.path for again in api.runs()] == [run.path]
    failed = trainkit.submit(functools.partial(fail, what="luck"), requeue=ONCE, name="unlucky")
    with pytest.raises(LookupError, match="no luck") as error:
        failed.result(LIMIT_S)
    assert f'{__file__}", line ' in str(error.value.__cause__)
    assert failed.status.failure is not None
    assert (failed.status.failure.type, failed.status.failure.message) == ("LookupError", "no luck")
    lost = api.submit(lose_a_peer, gpus_per_node=2, requeue=ONCE, device="cpu")
    with pytest.raises(trainkit.RunError, match="SIGKILL") as killed:
        lost.result(LIMIT_S)
    assert "diagnose" in killed.value.hint
    assert asyncio.run(_awaited()) == [(2, "0"), (3, "0")]
    assert api.Run("add-2").done()
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow(seconds=10)
def test_a_handle_is_small_and_an_await_can_time_out(folder: Path) -> None:
    file = folder / "sleeps"
    file.touch()
    run = api.submit(sleep_while, file)
    before = len([*Path("/proc/self/fd").iterdir()])
    handles = [api.Run(run.path) for _ in range(50)]
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(_value(run, 0.5))  # the call joins the threads of its loop
    file.unlink()
    assert pickle.loads(pickle.dumps(handles[-1])).result(LIMIT_S) == "woken"
    group = api.map_array(sleep_while, [folder / "no", file])
    group.cancel(now=True)
    assert isinstance(group[1].exception(LIMIT_S), trainkit.RunError)


async def _awaited() -> list[tuple[int, str]]:
    return [*await asyncio.gather(*(_value(api.submit(add, number)) for number in (1, 2)))]


async def _value(run: api.Run | api.Group, timeout_s: float | None = None) -> Any:
    return await asyncio.wait_for(run, timeout_s)


@pytest.mark.slow(seconds=10)
def test_an_array_and_a_sweep() -> None:
    group = api.map_array(add, range(3), [10] * 4, limit=2, name="three")
    last = group[-1]
    assert (last.status.state, "earlier runs" in (last.status.reason or "")) == ("pending", True)
    with pytest.raises(UsageError, match="has not started"):
        last.cancel()
    assert last.result(LIMIT_S) == (12, "0")
    results = [(10, "0"), (11, "0"), (12, "0")]
    assert (len(group), group.results(LIMIT_S), asyncio.run(_value(group))) == (3, results, results)
    assert ([run.name for run in group[1:3]], group[-1].result()[0]) == (["three/1", "three/2"], 12)
    assert group.status.states == {"finished": 3}
    assert api.Group("three").path == group.path
    assert {one.name for one in api.runs()} == {"three"}
    row = "<tr><td>2</td><td>2</td><td>10</td><td>finished</td><td>(12, &#x27;0&#x27;)</td></tr>"
    assert row in plain(group)
    assert sorted(run.result()[0] for run in api.as_completed(group, LIMIT_S)) == [10, 11, 12]
    swept = api.sweep(add, {"one": [1, 2], "other": [3]}, limit=4)
    assert [value for value, _ in swept.results(LIMIT_S)] == [4, 5]
    assert [trial.values for trial in swept.status.trials][1] == {"one": 2, "other": 3}
    with pytest.raises(UsageError, match="is a single run, not a group"):
        api.Group(group[0].path)
    with pytest.raises(UsageError, match="nothing to call"):
        api.map_array(add, [])


@pytest.mark.slow(seconds=10)
def test_a_notice_a_cancel_and_a_resume(folder: Path) -> None:
    run = api.submit(Counts(), 10, folder / "asked")
    wait_until_running(run)
    with pytest.raises(TimeoutError):
        run.wait(0.1)
    subprocess.run([sys.executable, "-m", "trainkit", "requeue", str(run.path)], check=True, env=os.environ)
    number, saved_at, attempt = run.result(LIMIT_S)
    assert (number, attempt) == (saved_at, "2")
    assert saved_at > 0
    run = api.submit(CountsInSubmitit(), 10, folder / "later", name="cancelled")
    wait_until_running(run)
    # Another process cancels the run, as a colleague on the same account would.
    subprocess.run([sys.executable, "-m", "trainkit", "cancel", "cancelled"], check=True, env=os.environ)
    error = run.exception(LIMIT_S)
    assert isinstance(error, trainkit.RunError)
    assert "resume" in error.hint
    number, saved_at, attempt = run.resume().result(LIMIT_S)
    assert (number, attempt) == (saved_at, "2")


@pytest.mark.slow(seconds=15)
def test_a_training_and_a_command(folder: Path) -> None:
    run = api.submit("quickstart", train={"steps": 4}, **{"train.log_every": 1}, name="trained", device="cpu")
    assert [record["step"] for record in run.wait(LIMIT_S).metrics()] == [1, 2, 3, 4]
    with pytest.raises(trainkit.RunError, match="has no result"):
        run.result()
    assert len(run.resume(train={"steps": 5}).wait(LIMIT_S).metrics()) == 5
    assert read_json(run.path / "attempts/002/end.json")["state"] == "finished"
    run.resume(from_step=4, skip_samples=[range(130, 140)]).wait(LIMIT_S)
    [rollback] = read_json(run.path / "rollbacks.json")
    assert (rollback["step"], rollback["from_step"], rollback["skipped"]) == (4, 5, [[130, 140]])
    script = folder / "script.py"
    script.write_text("print('here')\n")
    run = api.submit(command=[sys.executable, script])
    assert (run.wait(LIMIT_S).name, run.logs()) == ("script", "here\n")


@pytest.mark.slow(seconds=10)
def test_the_examples_of_the_docs(folder: Path) -> None:
    text = (ROOT / "docs" / "coming-from.md").read_text()
    blocks = dict(re.findall(r"```python ?(\w*)\n(.*?)```", text, re.DOTALL))
    assert blocks.keys() == {"", "submitit", "trainkit"}
    printed = []
    for name in ("submitit", "trainkit"):
        (folder / f"{name}_example.py").write_text(blocks[""] + blocks[name])
        argv = [sys.executable, f"{name}_example.py"]
        printed.append(
            subprocess.run(argv, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout
        )
    assert printed == ["12\n[11, 22, 33]\n"] * 2


@pytest.mark.slow(seconds=10)
def test_the_page_about_python(folder: Path) -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    [block] = re.findall(r"```python run\n(.*?)```", text, re.DOTALL)
    (folder / "page.py").write_text(block)
    argv = [sys.executable, "page.py"]
    printed = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout
    first, *rest = printed.splitlines()
    assert float(first) == pytest.approx(0.9**10)
    assert sorted(line.split()[0] for line in rest) == ["train-2/0", "train-2/1", "train-2/2"]


@pytest.mark.slow(seconds=15)
def test_in_a_notebook(folder: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cells = [
        "from trainkit import api\nfactor = 3",
        "def times(x):\n    return x * factor",
        "run = api.submit(times, 14); run.result(100)",
        "run",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    client = nbclient.NotebookClient(book, timeout=LIMIT_S, resources={"metadata": {"path": str(folder)}})
    client.execute()
    results = [cell.outputs[-1].data for cell in book.cells[2:]]
    assert results[0]["text/plain"] == "42"
    assert ">finished</td>" in results[1]["text/html"]
