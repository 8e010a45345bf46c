"""Tests a capability in a separate package: after its installation, the commands support it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_program, wait_for
from tests.support.said import said
from trainkit.capability import Capability
from trainkit.run.events import read_events
from trainkit.run.rundir import RunDir
from trainkit.shipped import SHIPPED, files_of, keys_of, load

ROOT = Path(__file__).resolve().parents[1]
TOY = '''
import time
from dataclasses import dataclass

import click

from trainkit.capability import Capability, Companion, Part, Planned, Watch
from trainkit.config.section import Section, key
from trainkit.job.decision import PlannedStop
from trainkit.run.events import log_event


class ToyConfig(Section):
    """How often the toy ticks."""

    ticks: int | None = key(None, "Number of ticks; null for no toy.", ge=1)


@dataclass(frozen=True)
class ToyPlan(Part):
    CAPABILITY = "toy"
    ticks: int


class Clock(Companion):
    def __init__(self, file, ticks):
        self.file = file
        file.write_text("tick\\n" * ticks)

    def end(self, *, is_finished):
        with self.file.open("a") as stream:
            stream.write(f"finished={is_finished}\\n")


class Restarts(Watch):
    def poll(self):
        return PlannedStop("asked", "the toy restarts the run")


class Careless(Watch):
    def poll(self):
        return "soon"


class Toy(Capability):
    name = "toy"
    Config = ToyConfig
    commands = {"toy": "toy_capability:show", "toy-broken": "toy_capability:broken"}

    def contradictions(self, config):
        if config.toy.ticks == 12:
            yield "toy.ticks", "is 12, which no clock shows", "choose another"

    def packages(self, config):
        return {"no_such_clock": "toy.ticks"} if config.toy.ticks == 7 else {}

    def problems(self, loaded, facts):
        if loaded.config.toy.ticks == 13:
            yield "toy.ticks", "is 13, which is unlucky", "choose another"

    def plan(self, loaded, facts, draft):
        ticks = loaded.config.toy.ticks
        if ticks is None:
            return Planned(warnings=("toy.ticks is null: the toy does nothing",))
        return Planned(ToyPlan(ticks), {"toy": f"{ticks} ticks for {draft.world_size} ranks"})

    def environ(self, attempt, plan):
        return {"TOY_TICKS": str(plan.part(ToyPlan).ticks)}

    def companion(self, attempt, plan, node):
        if plan.part(ToyPlan).ticks == 3:
            raise OSError("the toy is broken")
        log_event(attempt.run, attempt.number, "toy.hot", tick=1)
        return Clock(attempt.run.path / "toy.txt", plan.part(ToyPlan).ticks) if node.has_rank_0 else None

    def watch(self, attempt, plan, hosts):
        if plan.part(ToyPlan).ticks == 3:
            return Careless()
        return Restarts() if plan.part(ToyPlan).ticks == 4 and attempt.number == 1 else None

    def on_event(self, attempt, event):
        with (attempt.run.path / "toy-events.txt").open("a") as stream:
            print(event.name, file=stream)

    def on_end(self, attempt, plan, end):
        (attempt.run.path / "toy-end.txt").write_text(end.state)

    def rows(self, reading):
        return {"toy": f"{reading.plan.parts['toy'].count('ticks')} ticks planned"}

    def status(self, reading):
        return {"toy_ticks": reading.plan.parts["toy"].count("ticks")}

    def past(self, event):
        return f"the toy was hot at tick {event.count('tick')}"

    def report(self, history):
        return {"toy_events": [event.name for event in history.events.owned.all]}


@click.command()
@click.argument("run")
def show(run):
    """Print the ticks of RUN."""
    click.echo(open(f"{run}/toy.txt").read(), nl=False)
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package in a separate folder."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "toy_capability.py").write_text(TOY)
    info = folder / "toy_capability-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-capability\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[trainkit.capabilities]\ntoy = toy_capability:Toy\n")
    return folder


def trainkit(cwd: Path, site: Path | None, *args: str) -> "subprocess.CompletedProcess[str]":
    paths = [str(ROOT)] if site is None else [str(ROOT), str(site)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XDG_STATE_HOME": str(cwd / "state")}
    return run_program(sys.executable, "-m", "trainkit", *args, cwd=cwd, env=env, timeout=120)


def submit(
    cwd: Path, site: Path, *settings: str, command: str = "true"
) -> "subprocess.CompletedProcess[str]":
    options = [word for setting in settings for word in ("--set", setting)]
    given = ("--backend", "local", "--follow", "--run-dir", "run", *options, "--", "sh", "-c", command)
    return trainkit(cwd, site, "submit", *given)


def test_a_key_a_part_a_companion_a_variable_an_event_a_row_and_a_command(tmp_path: Path, site: Path) -> None:
    done = submit(tmp_path, site, "toy.ticks=2", command="echo has $TOY_TICKS")
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(tmp_path / "run")
    assert run.attempt(1).rank_log(0).read_text() == "has 2\n"
    assert "toy:\n  ticks: 2\n" in run.config_file.read_text()
    assert json.loads(run.plan_file.read_text())["capabilities"] == {"toy": {"ticks": 2}}
    assert json.loads(run.provenance_file.read_text())["capabilities"] == {"toy": "toy-capability 1.2"}
    wait_for((run.path / "toy-end.txt").exists)
    assert (run.path / "toy-end.txt").read_text() == "finished"
    assert {event.name for event in read_events(run, "started", "finished")} <= set(
        (run.path / "toy-events.txt").read_text().split()
    )
    assert trainkit(tmp_path, site, "toy", "run").stdout == "tick\ntick\nfinished=True\n"
    assert "toy         2 ticks planned" in trainkit(tmp_path, site, "status", "run").stdout
    status = json.loads(trainkit(tmp_path, site, "status", "run", "--json").stdout)
    assert (status["rows"], status["toy_ticks"]) == ({"toy": {"toy": "2 ticks planned"}}, 2)
    report = json.loads(trainkit(tmp_path, site, "report", "run", "--json").stdout)
    assert report["toy_events"] == ["toy.hot"]
    assert "hot at tick 1" in trainkit(tmp_path, site, "watch", "run", "--once").stdout


def test_what_is_refused_names_the_key(tmp_path: Path, site: Path) -> None:
    (tmp_path / "own.yaml").write_text("toy:\n  tick: 2\n")
    for ticks in (0, 12, 7, 13):
        done = submit(tmp_path, site, f"toy.ticks={ticks}")
        assert done.returncode == 2
        said(done.stderr)
    done = trainkit(tmp_path, site, "check", "own.yaml")
    assert done.returncode == 2
    said(done.stderr)
    (tmp_path / "own.yaml").write_text("toy: {class_path: a.B}\n")
    said(trainkit(tmp_path, site, "check", "own.yaml").stderr)
    assert not (tmp_path / "run").exists()


def test_one_that_is_not_installed_is_an_unknown_key(tmp_path: Path) -> None:
    done = trainkit(tmp_path, None, "submit", "--set", "toy.ticks=2", "--", "true")
    assert done.returncode == 2
    assert "toy: unknown key" in done.stderr


def test_a_run_whose_capability_is_gone_says_so(tmp_path: Path, site: Path) -> None:
    assert submit(tmp_path, site, "toy.ticks=1").returncode == 0
    done = trainkit(tmp_path, None, "status", "run")
    assert "toy         unknown: " in done.stdout
    watched = trainkit(tmp_path, None, "watch", "run", "--once").stdout
    assert "toy is unknown: " in watched


def test_a_broken_companion_and_a_broken_watch_do_not_end_the_training(tmp_path: Path, site: Path) -> None:
    done = submit(tmp_path, site, "toy.ticks=3")
    assert done.returncode == 0, done.stdout + done.stderr
    attempt = RunDir(tmp_path / "run").attempt(1)
    assert attempt.node_log(0).read_text().count("OSError: the toy") == 1
    assert attempt.supervisor_log.read_text().count("TypeError: Careless.poll") == 1


def test_a_watch_makes_the_run_restart(tmp_path: Path, site: Path) -> None:
    waits = 'trap "exit 0" USR2; test $TRAINKIT_JOB_ATTEMPT = 2 || while sleep 0.1; do :; done'
    done = submit(tmp_path, site, "toy.ticks=4", command=waits)
    assert done.returncode == 0, done.stdout + done.stderr
    log = RunDir(tmp_path / "run").attempt(1).supervisor_log.read_text()
    assert log.count("attempt 1: the toy") == 1
    end = json.loads(RunDir(tmp_path / "run").attempt(1).end_file.read_text())
    assert (end["action"], end["cause"]) == ("restart", "asked")


@pytest.mark.parametrize(
    "files", [{"plan.json": "{}"}, {"../out": ""}, {"a/b": ""}, {"": ""}, {"a": 1}, ["a"], None]
)
def test_a_part_writes_no_file_of_the_run(files: object) -> None:
    with pytest.raises(ValueError, match="toy"):
        files_of({"toy": {"files": files}})


@pytest.mark.parametrize("keys", [[["a"]], [1], "a", None, {"a": 1}])
def test_the_keys_of_a_part_are_a_list(keys: object) -> None:
    with pytest.raises(ValueError, match="the part of toy has invalid keys"):
        keys_of({"toy": {"keys": keys}})


def test_no_other_package_is_imported_without_its_section(tmp_path: Path, site: Path) -> None:
    (site / "toy_capability.py").rename(site / "away.py")
    try:
        done = submit(tmp_path, site)
    finally:
        (site / "away.py").rename(site / "toy_capability.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "capabilities" not in json.loads((tmp_path / "run" / "plan.json").read_text())


@pytest.mark.parametrize(
    "name", [name for name, own in SHIPPED.items() if own.has_class and own.without_keys]
)
def test_one_that_no_config_asks_for_has_nothing_to_say_of_it(name: str) -> None:
    """A dry run does not import the capability."""
    of_config = ("contradictions", "packages", "problems", "plan", "plan_command", "quiet", "other_keys")
    kind = type(load(name))
    assert [own for own in of_config if getattr(kind, own) is not getattr(Capability, own)] == []
