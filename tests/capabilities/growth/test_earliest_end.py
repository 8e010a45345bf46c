"""Tests ``--nodes auto``: the data of the decision, the decision, and the resulting job."""

import sys
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from tests.support.fake_slurm import FakeSlurm
from tests.support.said import said
from trainkit.capabilities.growth import earliest_end
from trainkit.capabilities.growth.earliest_end import Choice, Offer, Work, earliest, expected_work, with_end
from trainkit.cluster.machine import Machine
from trainkit.cluster.model import Cluster, NodeKind, Partition
from trainkit.cluster.target import LOCAL, Target
from trainkit.config import LoadedConfig, dump_effective, load_config
from trainkit.config.load import with_values
from trainkit.data.checks import DataFacts
from trainkit.errors import ConfigError, UsageError
from trainkit.plan.facts import Facts
from trainkit.plan.gpus import RESTART_S
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import with_parts
from trainkit.plan.node_range import plan_nodes
from trainkit.plan.workload import TRAINER, Workload
from trainkit.run.events import log_event
from trainkit.run.files import append_jsonl
from trainkit.run.registry import register
from trainkit.run.rundir import RunDir

HOUR = 3600.0
RESTART_H = RESTART_S / HOUR
SLICES = ["resources.time=3:0:0", "resources.slice=1:0:0"]
BATCH = ("data.seq_len=2048", "train.device_batch_size=2", "train.global_batch_size=64")
NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=timezone.utc)
H100, A100 = NodeKind(8, 64, 900_000, {"h100": 4}), NodeKind(12, 64, 500_000, {"a100": 4})
WEST = Cluster(
    "west",
    (
        Partition("h", is_default=True, max_time_s=12 * 3600, nodes=(H100,)),
        Partition("a", max_time_s=24 * 3600, nodes=(A100,)),
        Partition("few", max_time_s=24 * 3600, max_nodes=2, nodes=(A100,)),
    ),
    slurm_version=(24, 11, 5),
)
FACTS = Facts(Machine(2, 0, (), "no GPU"), Target("sbatch", "a test", WEST), DataFacts(vocab_size=256))


def on(cluster: Cluster) -> Facts:
    return replace(FACTS, target=Target("sbatch", "a test", cluster))


ANSWERS = """
nodes= partition=h limit=
for word; do case $word in
    --nodes=*) nodes=${{word#*=}};; --partition=*) partition=${{word#*=}};; --time=*) limit=${{word#*=}};;
esac; done
start=0
case $nodes/$partition/$limit in {cases}; esac
echo "sbatch: Job 9 to start at $(($(/bin/date +%s) + start)) using 64 processors on nodes g1" >&2
"""
REFUSES = "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1"


def config(*overrides: str) -> LoadedConfig:
    given = ["model.preset=1b", *BATCH, "train.steps=1000", *overrides]
    return load_config(None, overrides=given, environ={}, cwd=Path.cwd())


class Slurm(FakeSlurm):
    """A cluster that answers when a request would start."""

    def choose(
        self, cases: str, *overrides: str, facts=FACTS, workload=TRAINER, left=1.0
    ) -> tuple[LoadedConfig, LaunchPlan, Choice]:
        """Choose nodes; `cases` maps nodes/partition/limit to answers of sbatch, or is a script."""
        is_script = cases.startswith(("echo", "/bin"))
        self.add("sbatch", cases if is_script else ANSWERS.format(cases=cases))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(earliest_end, "gather", lambda *args, **kwargs: facts)
            return earliest_end.choose_nodes(config(*overrides), workload, left=left)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    slurm = Slurm(tmp_path / "slurm")
    (slurm.folder / "bin").mkdir(parents=True)
    monkeypatch.setenv("PATH", slurm.environ["PATH"])
    monkeypatch.chdir(tmp_path)
    slurm.add("scontrol", "echo g1")
    return slurm


@pytest.mark.parametrize(
    ("own", "most", "sizes"),
    [(1, 8, [1, 2, 4, 8]), (1, 1, [1]), (6, 30, [3, 6, 12, 24]), (4, 7, [1, 2, 4]), (5, 0, [5])],
)
def test_sizes_around(own, most, sizes):
    assert earliest_end.sizes_around(own, most) == sizes


def test_what_was_not_measured_is_in_proportion_to_what_was():
    base = {
        (n, gpu): Work(800 / n * slow, "planned") for n in (1, 2, 8) for gpu, slow in (("h", 1), ("a", 2))
    }
    assert expected_work(base, {}) == base
    found = expected_work(base, {(2, "h"): Work(500, "measured in x"), (64, "h"): Work(1, "no such size")})
    assert {place: work.seconds for place, work in found.items()} == {
        **{(1, "h"): 1000, (2, "h"): 500, (8, "h"): 125},
        **{(1, "a"): 2000, (2, "a"): 1000, (8, "a"): 250},
    }
    assert found[2, "h"].source == "measured in x"
    assert {work.source for place, work in found.items() if place != (2, "h")} == {"measured in x, scaled"}
    # The measurement with the nearest number of nodes of the same type counts.
    found = expected_work(base, {(8, "a"): Work(400, "x"), (1, "h"): Work(800, "y")})
    assert (found[2, "h"].source, found[2, "a"].source) == ("y, scaled", "x, scaled")


def offer(
    start_s: float | None, work_h: float, num_nodes: int = 1, limit_h: float = 1.0, is_slice: bool = False
) -> Offer:
    start = None if start_s is None else NOW + timedelta(seconds=start_s)
    work, remark = Work(work_h * HOUR, "planned"), "" if start else "busy"
    return Offer(num_nodes, "h", limit_h * HOUR, work, start, is_slice, remark=remark)


@pytest.mark.parametrize(
    ("given", "overrides", "end_h", "num_jobs"),
    [
        (offer(-5, 1), [], 1, 1),  # Slurm's clock is behind
        (offer(HOUR, 1), [], 2, 1),
        (offer(HOUR, 2.5), [], 5.5 + 2 * RESTART_H, 3),  # three jobs wait, each for 2.5 hours
        (offer(0, 3), [], 3 + 3 * RESTART_H, 4),  # the restarts reduce the training time of the jobs
        (offer(0, 2.5), ["requeue.on=[crash]"], None, 1),
        (offer(0, 1, limit_h=RESTART_H), [], None, 1),
        (offer(0, 1.5), SLICES, 1.5 + RESTART_H, 2),
        (offer(0, 4), SLICES, None, 1),
        (offer(0, 3), SLICES, 3 + 3 * RESTART_H, 4),  # the restarts need a fourth job
        (offer(0, 4, is_slice=True), ["resources.time=3:0:0"], 4 + 4 * RESTART_H, 5),
        (offer(0, 99, limit_h=float("inf")), [], 99, 1),
        (offer(None, 1), [], None, 1),
    ],
)
def test_the_end(given, overrides, end_h, num_jobs):
    found = with_end(given, config(*overrides).config, NOW)
    assert found.end_time == (None if end_h is None else NOW + timedelta(hours=end_h))
    assert found.num_jobs == num_jobs
    assert bool(found.remark) == (end_h is None)
    if found.remark:
        said(found.remark)


def test_a_gap_is_used_once():
    def end_h(whole_h: float, work_h: float = 1.5) -> float:
        found = with_end(offer(0, work_h), config().config, NOW, NOW + timedelta(hours=whole_h))
        return (found.end_time - NOW).total_seconds() / HOUR

    assert end_h(whole_h=0.5) == pytest.approx(1.5 + RESTART_H)
    assert end_h(whole_h=10) == pytest.approx(10.5 + RESTART_H)
    assert end_h(whole_h=10, work_h=1) == 1


def test_the_earliest_end_with_the_fewest_nodes():
    offers = [
        with_end(one, config().config, NOW)
        for one in (offer(None, 0.1), offer(HOUR, 0.5, 4), offer(0, 1, 2), offer(0, 1, 1))
    ]
    assert earliest(offers) is offers[3]
    assert earliest(offers[:3]) is offers[2]
    assert earliest(offers[:2]) is offers[1]
    assert earliest(offers[:1]) is None
    whole, cut = (replace(one, end_time=NOW) for one in (offer(0, 9, 4, 9.0), offer(0, 9, 2, is_slice=True)))
    assert earliest([replace(cut, num_jobs=9), whole]) is whole


@pytest.mark.parametrize(
    ("overrides", "cases", "nodes", "partition"),
    [
        ([], "8/*) start=0", 8, "h"),  # the cluster is idle, so the run gets the largest size
        ([], "8/*) start=90000;; 4/*) start=80000", 2, "h"),
        (["resources.partition=a,h"], "*/h/*) start=90000", 8, "a"),
        # Because of a maintenance, only a short job would end in time.
        (["resources.time_min=00:05:00"], "*/01:00:00) start=90000", 8, "h"),
        (["resources.nodes=2-4"], "4/*) start=90000", 2, "h"),
        (["resources.nodes='2,8'"], "2/*) start=5", 8, "h"),
        (["resources.partition=few", "resources.nodes='1,2,4'"], "1/*) start=60", 2, "few"),
    ],
)
def test_a_choice(slurm, overrides, cases, nodes, partition):
    given = ["optimizer.lr_scale=linear", *overrides]
    loaded, plan, choice = slurm.choose(cases, *given)
    assert choice.taken.num_nodes == plan.num_nodes == nodes
    assert choice.taken.partition == partition
    assert (plan.slurm.sbatch["nodes"], plan.slurm.sbatch["partition"]) == (nodes, partition)
    assert plan.may_lose_nodes == ("no-kill" in plan.slurm.sbatch) == bool(plan.sizes)
    assert all(int(size) < nodes for size in plan.sizes)
    assert all(plan.at(int(size)).slurm.sbatch == plan.slurm.sbatch for size in plan.sizes)  # type: ignore[union-attr]
    # Batch and learning rate are the same as in a config without auto.
    own = plan_nodes(config(*given), FACTS)
    assert (plan.batch.global_batch_size, plan.lr) == (own.batch.global_batch_size, own.lr)
    assert own.num_nodes in loaded.config.resources.node_counts
    assert len([call for call in slurm.calls if call[0] == "sbatch"]) <= 12
    assert {item.work.source for item in choice.offers} == {"planned"}


@pytest.mark.parametrize(
    ("overrides", "cases", "partition", "slice_"),
    [
        # the cluster is idle, so no restart is needed
        (["resources.partition=a"], "8/*) start=0", "a", None),
        ([], "8/*) start=0", "h", "12:00:00"),  # the limit of the only partition
        (["resources.partition=a,h"], "*/a/*) start=90000", "h", "12:00:00"),
        # A partition that refuses the job for its size does not limit its time.
        (["resources.partition='h,few'", "resources.nodes=4"], "8/*) start=0", "h", "12:00:00"),
        # A maintenance begins in some hours.
        (["resources.partition=a"], "*/1-*) start=90000", "a", "04:00:00"),
        # one gap would cost many restarts
        (["resources.partition=a"], "*/1-* | */04:*) start=90000", "a", None),
        (["resources.partition=a", "train.steps=99000"], "*/1-* | */04:*) start=90000", "a", "01:00:00"),
        (["resources.partition=a", "resources.time_min=10:0:0"], "*/1-*) start=90000", "a", None),
        (["resources.partition=a", "requeue.on=[crash]"], "*/1-*) start=90000", "a", None),
        (["resources.partition=a", "resources.slice=2:0:0"], "*/02:*) start=90000", "a", "2:0:0"),
    ],
)
def test_a_slice(slurm, overrides, cases, partition, slice_):
    given = ["resources.time=1-00:00:00", "train.steps=300000", *overrides]
    loaded, plan, choice = slurm.choose(cases, *given)
    assert (choice.taken.partition, loaded.config.resources.slice) == (partition, slice_)
    assert len([call for call in slurm.calls if call[0] == "sbatch"]) <= earliest_end.MOST_ASKED
    assert choice.taken.is_slice == (slice_ is not None and slice_ not in str(given))
    assert ("slice" in plan.reasons) == choice.taken.is_slice
    if choice.taken.is_slice:
        said(plan.reasons["slice"])
    assert plan.workers_per_node == 4
    if slice_ is not None:  # the time limit is set as if it had been typed
        own = (f"resources.slice={slice_}", f"resources.partition={partition}")
        typed = plan_nodes(config(*given, *own), FACTS)
        options = ("time", "signal")
        assert [plan.slurm.sbatch[one] for one in options] == [typed.slurm.sbatch[one] for one in options]
        assert plan.requeue == typed.requeue
        assert (plan.requeue.total_s, plan.reasons["time"]) == (24 * HOUR, typed.reasons["time"])
        # `trainkit resume` plans in the same way
        again = plan_nodes(with_values(loaded, {}, "again"), FACTS, before=plan)
        assert (again.requeue, again.lr) == (plan.requeue, plan.lr)


def test_a_partition_that_takes_only_slices_changes_nothing_of_another(slurm):
    tiny = Partition("tiny", max_time_s=2 * 3600, nodes=(NodeKind(12, 64, 500_000, {"a100": 2}),))
    facts = on(replace(WEST, partitions=(WEST.partitions[1], tiny)))
    given = ("resources.partition='a,tiny'", "resources.time=1-00:00:00", "train.steps=99000")
    loaded, plan, choice = slurm.choose("*/1-* | */04:*) start=90000", *given, facts=facts)
    assert (choice.taken.partition, loaded.config.resources.slice) == ("a", "01:00:00")
    assert (plan.workers_per_node, loaded.config.resources.gpus_per_node) == (4, 4)
    assert plan_nodes(with_values(loaded, {}, "again"), facts, before=plan).workers_per_node == 4


def test_the_time_of_a_run_that_is_cut_is_enough_for_its_restarts(slurm):
    # the speed of these sizes is not known
    cpus = ("device=cpu", "resources.gpus_per_node=1", "resources.nodes='4,8'")
    loaded, plan, choice = slurm.choose(
        "*/1-*) start=90000", "resources.partition=a", "resources.time=1-00:00:00", *cpus
    )
    assert (choice.taken.work.source.partition(":")[0], choice.taken.num_jobs) == ("assumed", 7)
    assert (loaded.config.resources.slice, loaded.config.resources.time) == ("04:00:00", "1-00:35:00")
    assert plan.requeue.total_s == 24 * HOUR + 7 * RESTART_S
    said(plan.reasons["slice"])


def test_what_fits_only_in_slices_is_refused_without_an_answer(slurm):
    with pytest.raises(ConfigError, match="is 1-00:00:00, but partition h allows at most 12:00:00"):
        slurm.choose(REFUSES, "resources.time=1-00:00:00", "train.steps=500000")


def test_a_command_is_not_cut(slurm):
    given = ("resources.partition=a", "resources.time=1-00:00:00", "resources.gpus_per_node=4")
    workload = Workload((sys.executable,))
    loaded, _, choice = slurm.choose(
        "*/1-*) start=90000", *given, facts=replace(FACTS, data=None), workload=workload
    )
    assert {offer.limit_s for offer in choice.offers} == {24 * HOUR}
    assert loaded.config.resources.slice is None


def test_of_too_many_questions_slices_are_left_out_first(slurm):
    def asked(num_partitions: int, *overrides: str) -> tuple[int, int, int]:
        """Return the numbers of queries, of sizes and of time limits."""
        names = [f"p{number}" for number in range(num_partitions)]
        parts = tuple(Partition(name, max_time_s=24 * 3600, nodes=(H100,)) for name in names)
        facts = on(replace(WEST, partitions=parts))
        given = (f"resources.partition='{','.join(names)}'", "resources.time=1-0", *overrides)
        offers = slurm.choose("8/*) start=0", *given, facts=facts)[2].offers
        # partial offers are queried last
        assert [one.is_slice for one in offers] == sorted(one.is_slice for one in offers)
        return len(offers), len({one.num_nodes for one in offers}), len({one.limit_s for one in offers})

    assert asked(1) == (12, 4, 3)
    assert asked(2) == (24, 4, 3)
    assert asked(3) == (24, 4, 2)
    assert asked(4) == (16, 4, 1)
    assert asked(1, "resources.nodes=1-8", "train.global_batch_size=6720") == (24, 8, 3)


def test_the_speed_is_that_of_earlier_runs(slurm, tmp_path):
    asked = ("resources.nodes='2,4,8'", "resources.partition=h")
    plan = plan_nodes(config(*asked), FACTS)
    for name, size, partition, step_s, override in (
        ("slow", 2, "h", 9.0, "seed=1"),
        ("other", 4, "h", 0.001, "model.dropout=0.1"),
        ("newer", 2, "h", 2.0, "parallel.dp_shard=8"),
        ("elsewhere", 8, "a", 0.001, "seed=1"),
        ("here", 4, None, 0.001, "seed=1"),
    ):
        run = RunDir(tmp_path / name)
        run.path.mkdir()
        attempt = run.attempt(1)
        attempt.create()
        run.config_file.write_text(dump_effective(config(*asked, override).config))
        attempt.plan_file.write_text(plan.at(size).to_text())
        log_event(run, 1, "started", partition=partition)
        for step in range(3):
            append_jsonl(run.metrics_file, {"step": step, "attempt": 1, "step_s": step_s})
        register(run, name)
    _, chosen, choice = slurm.choose("8/*) start=600", *asked)
    sources = {item.num_nodes: item.work.source for item in choice.offers}
    assert sources.keys() == {8, 4, 2}
    said("\n".join(sources[size] for size in (8, 4, 2)))
    assert next(item.work.seconds for item in choice.offers if item.num_nodes == 2) == 2000
    assert chosen.num_nodes == 4
    lines = list(choice.lines(chosen))
    assert lines[0].split("  ")[0] == "nodes"
    assert [line.split()[0] for line in lines[1:4]] == ["8", "4*", "2"]
    assert "sbatch --test-only" in lines[4]
    _, _, longer = slurm.choose("8/*) start=600", *asked, "train.steps=5000")
    assert next(item.work.seconds for item in longer.offers if item.num_nodes == 2) == 10_000
    _, _, resumed = slurm.choose("8/*) start=600", *asked, left=0.25)
    assert next(item.work.seconds for item in resumed.offers if item.num_nodes == 2) == 500


@pytest.mark.parametrize(
    ("facts", "sbatch", "reason"),
    [
        (replace(FACTS, target=LOCAL), "", "trainkit can estimate when nodes become free only"),
        (FACTS, "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1", "connect failure"),
        (FACTS, "/bin/sleep 60", "did not answer within"),
        (FACTS, REFUSES, "the run is not expected to finish with any possible request"),
        (on(Cluster("west", error="sinfo did not answer")), "", "sinfo did not answer"),
    ],
)
def test_without_an_answer_the_request_stays(slurm, monkeypatch, facts, sbatch, reason):
    monkeypatch.setattr(earliest_end, "ENOUGH_S", 0.5)
    given = ("resources.nodes=2-4", "device=cpu", "resources.gpus_per_node=2")
    begin = time.monotonic()
    loaded, plan, choice = slurm.choose(sbatch, *given, facts=facts)
    assert time.monotonic() - begin < 5
    assert choice.taken is None
    assert reason in choice.reason
    assert plan == with_parts(plan_nodes(loaded, facts), loaded, facts)
    assert loaded.config == config(*given).config
    assert list(choice.lines(plan))[-1].startswith(f"--nodes auto: {choice.reason};")


def test_without_any_limit_nothing_tells_how_long_it_takes(slurm):
    cluster = replace(WEST, partitions=(replace(WEST.partitions[0], max_time_s=None),))
    facts = replace(FACTS, target=Target("sbatch", "", cluster))
    choice = slurm.choose("8/*) start=0", "device=cpu", "resources.time=null", facts=facts)[2]
    assert choice.taken is None
    said(choice.reason)


def test_what_slurm_has_not_answered_in_time_does_not_count(slurm, monkeypatch):
    monkeypatch.setattr(earliest_end, "ENOUGH_S", 1.0)
    begin = time.monotonic()
    _, plan, choice = slurm.choose("8/*) /bin/sleep 60", "device=cpu")
    assert time.monotonic() - begin < 5
    assert plan.num_nodes < 8
    said(choice.offers[0].remark)


def test_priorities_are_shown_where_slurm_has_them(slurm):
    slurm.add("sprio", "echo Weights 1000")
    assert slurm.choose("8/*) start=0")[2].priority == ""
    slurm.add("sshare", "echo FairShare 0.5")
    _, plan, choice = slurm.choose("8/*) start=0")
    assert list(choice.lines(plan))[-1].endswith(":\nWeights 1000\nFairShare 0.5")


def test_the_one_cluster_of_the_config_is_asked(slurm):
    slurm.add("sprio")
    assert slurm.choose("8/*) start=0", "resources.clusters=east")[2].taken is not None
    asked = [call[1] for call in slurm.calls if call[0] != "scontrol"]
    assert set(asked) == {"--clusters=east"}
    with pytest.raises(UsageError, match="the clusters east and west"):
        slurm.choose("8/*) start=0", "resources.clusters=east,west")


def test_a_repeated_value_of_the_config_stays(slurm):
    loaded, plan, _ = slurm.choose("8/*) start=90000", "resources.nodes=4")
    assert loaded.config.resources.nodes == "1,2,4,8"
    again = plan_nodes(with_values(loaded, {}, "again"), FACTS, before=plan)
    assert again.num_nodes == 8
    assert (again.batch.global_batch_size, again.lr) == (plan.batch.global_batch_size, plan.lr)
