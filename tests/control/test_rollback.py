"""Tests the rollback that a user requests: what is planned, and what is refused without any effect."""

from dataclasses import replace

import pytest

from tests.control.test_resume import PLAN, load
from tests.run.test_manifest import change, make
from tests.support.said import said
from trainkit.control.changed_config import RunSoFar
from trainkit.control.resume import copy_newest_checkpoint, newest_checkpoint_of, recorded
from trainkit.control.rollback import RollbackRequest, before, plan_rollback
from trainkit.errors import UsageError
from trainkit.plan.workload import Workload
from trainkit.run.events import read_events
from trainkit.run.manifest import published
from trainkit.run.record import JobRecord
from trainkit.run.rollbacks import Rollback, parse_ranges, read_rollbacks
from trainkit.run.rundir import RunDir


@pytest.fixture
def so_far(tmp_path, monkeypatch) -> RunSoFar:
    """Return a run that trained 40 steps of 16 samples, without the samples 200 to 299 from step 20 on."""
    monkeypatch.chdir(tmp_path)
    run = RunDir("run")
    for step in (10, 20, 30, 40):
        progress = {"samples_seen": 16 * step, **({"skipped": [[200, 300]]} if step > 10 else {})}
        change(make(run.checkpoints_dir, step), progress=progress)
    run.attempt(3).create()
    config = load(tmp_path).config
    return RunSoFar(run, JobRecord(), config, PLAN, None, published(run.checkpoints_dir))


@pytest.mark.parametrize(
    ("step", "ranges", "wanted"),
    [
        (None, ["740-800"], Rollback(40, 40, 3, ((740, 801),))),
        (20, [], Rollback(20, 40, 3)),
        (20, ["500-509", "420-499"], Rollback(20, 40, 3, ((420, 510),))),
        (10, ["160-199"], Rollback(10, 40, 3, ((160, 200),))),
        (0, ["0-9"], Rollback(0, 40, 3, ((0, 10),))),
    ],
)
def test_what_is_planned(so_far, step, ranges, wanted):
    request = RollbackRequest.of(step, parse_ranges(ranges))
    assert request is not None
    found = plan_rollback(so_far, request)
    assert replace(found, reason="", time=None) == wanted
    assert [one.step for one in before(so_far, found).saved] == [
        s for s in (10, 20, 30, 40) if s <= wanted.step
    ]


def test_no_options_are_no_request():
    assert RollbackRequest.of(None, ()) is None


@pytest.mark.parametrize(
    "case",
    [
        ("no such step", 25, []),
        ("before the newest checkpoint", None, ["739-800"]),
        ("before an older checkpoint", 20, ["100-450", "500-600"]),
        ("damaged", 30, []),
        ("a command", 20, []),
        ("without checkpoints", 20, []),
    ],
    ids=lambda case: case[0],
)
def test_what_is_refused(so_far, case):
    name, step, ranges = case
    if name == "damaged":
        (so_far.saved[2].path / "__0_0.distcp").write_bytes(b"")
    if name == "a command":
        so_far = replace(so_far, plan=replace(PLAN, workload=Workload(("true",))))
    if name == "without checkpoints":
        so_far = replace(so_far, saved=[])
    request = RollbackRequest.of(step, parse_ranges(ranges))
    assert request is not None
    with pytest.raises(UsageError) as caught:
        plan_rollback(so_far, request)
    said(caught.value.render())


def test_a_rollback_is_recorded_only_if_the_attempt_starts(so_far):
    run, first, second = so_far.run, Rollback(30, 40, 3), Rollback(10, 30, 4, ((160, 200),))
    with recorded(run, first):
        assert read_rollbacks(run) == (first,)
    failing = recorded(run, second)
    failing.__enter__()
    assert read_rollbacks(run) == (first, second)
    error = KeyError()
    assert failing.__exit__(KeyError, error, None) is not True
    assert read_rollbacks(run) == (first,)
    with recorded(run, None):
        pass
    [event] = read_events(run, "rollback")
    assert (event.attempt, event.step, event.count("from_step")) == (3, 30, 40)


def test_a_copy_of_a_run_has_the_same_rollbacks(so_far, tmp_path):
    first, second = Rollback(30, 40, 3), Rollback(20, 30, 4, ((420, 430),))
    with recorded(so_far.run, first):
        pass
    copy = RunDir(tmp_path / "copy")
    copy.checkpoints_dir.mkdir(parents=True)
    newest = newest_checkpoint_of(before(so_far, second))
    copy_newest_checkpoint(newest, copy, so_far.run, second)
    assert [one.step for one in published(copy.checkpoints_dir)] == [20]
    assert read_rollbacks(copy) == (replace(first, attempt=0), replace(second, attempt=0))
    assert read_rollbacks(so_far.run) == (first,)
