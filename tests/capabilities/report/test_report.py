import json
from dataclasses import replace
from datetime import datetime, timezone
from html.parser import HTMLParser

import pytest

from benchmarks.report import write_run
from trainkit.capabilities.health.samples import health_file
from trainkit.capabilities.report import goodput
from trainkit.capabilities.report.goodput import NUM_BUCKETS, read_curves
from trainkit.capabilities.report.run_report import read_report, render_report
from trainkit.config import dump_effective
from trainkit.config.schema import RunConfig
from trainkit.observe.status import read_status
from trainkit.run.events import events_of
from trainkit.run.files import append_jsonl, write_json
from trainkit.run.history import RunHistory, attempts_of, ended_attempts, idle_gaps
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir

START = datetime(2026, 1, 1, 12, 0, 0, tzinfo=timezone.utc).timestamp()


def iso(second):
    return datetime.fromtimestamp(START + second, timezone.utc).isoformat()


def event(second, attempt, name, **fields):
    return {"time": iso(second), "attempt": attempt, "event": name, **fields}


def step(second, attempt, number, **fields):
    usual = {"loss": 10.0 / number, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 100.0}
    times = {"time": iso(second), "step_s": 2.0, "data_wait_s": 0.5}
    return {"attempt": attempt, "step": number, **times, **usual, **fields}


EVENTS = [
    event(0, 1, "submitted"),
    event(10, 1, "started"),
    event(20, 1, "training", step=0),
    event(24.5, 1, "evaluated", step=2, val_loss=5.0),
    event(25, 1, "checkpoint_begin", step=2),
    event(33, 1, "requeue_decision", action="restart", cause="crash"),
    event(33, 1, "stopped", state="failed", reason="rank 0 crashed"),
    event(37, 2, "started"),
    event(42, 2, "training", step=2),
    event(47, 2, "finished", state="finished"),
]
METRICS = [
    step(22, 1, 1),
    step(25, 1, 2),  # 2 s of the step, 1 s of evaluation
    step(28, 1, 3),  # the step was computed again, after 1 s of saving
    step(30, 1, 4),
    step(44, 2, 3),
    step(46, 2, 4),
]


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.attempt(1).create()
    run.config_file.write_text(dump_effective(RunConfig.model_validate({"train": {"steps": 4}})))
    write_json(run.plan_file, {"num_nodes": 1, "workers_per_node": 2, "world_size": 2, "device": "cpu"})
    entry = {"attempt": 2, "job_id": "local-7", "submitted_at": iso(0), "host": "here"}
    write_json(run.job_file, {"name": "<script>alert(1)</script>", "attempts": [entry]})
    run.attempt(2).create()
    write_json(run.attempt(2).end_file, {"state": "finished", "action": "finished", "reason": "done"})
    for record in EVENTS:
        append_jsonl(run.events_file, record)
    for record in METRICS:
        append_jsonl(run.metrics_file, record)
    return run


def attempts_in(records):
    return ended_attempts(attempts_of(events_of(records)), None)


def report_of(run):
    now = datetime.fromtimestamp(START + 100, timezone.utc)
    history = RunHistory(run)
    return read_report(history, read_status(history, read_job(run), False, now), now.timestamp())


def test_a_step_computed_twice_is_drawn_once(run):
    report = report_of(run)
    assert {number: [x for x, _ in points] for number, points in report.curves["loss"].items()} == {
        1: [1, 2],
        2: [3, 4],
    }


def test_a_run_that_failed_before_its_first_checkpoint_has_a_curve(run):
    run.metrics_file.write_text("")
    write_json(run.attempt(2).end_file, {"state": "failed", "action": "failed", "reason": "crashed"})
    for record in (step(44, 2, 3), step(46, 2, 4, loss=None), step(46, 2, 5, loss=None)):
        append_jsonl(run.metrics_file, record)
    report = report_of(run)
    assert (report.goodput, report.num_steps_lost) == (0.0, 3)
    assert [x for x, _ in report.metrics["loss"]] == [3, 4, 5]
    assert "not finite from 4" in render_report(report)


def test_a_requeue_gives_the_allocation_back():
    decision = event(33, 1, "requeue_decision", action="requeue", cause="preempted")
    events = [decision if record["event"] == "requeue_decision" else record for record in EVENTS]
    assert idle_gaps(attempts_in(EVENTS)) == 4.0
    assert idle_gaps(attempts_in(events)) == 0.0


def test_a_command_without_metrics_is_unmeasured_not_idle(run):
    run.metrics_file.unlink()
    run.events_file.unlink()
    append_jsonl(run.events_file, event(0, 1, "started"))
    append_jsonl(run.events_file, event(8, 1, "finished", state="finished"))
    report = report_of(run)
    assert (report.spent["unmeasured"], report.allocated_s, report.goodput) == (8.0, 8.0, None)
    assert "has no metrics." in render_report(report)
    for number in (1, 2):  # the metrics were found in the log of the run
        record = {"step": number, "time": iso(4 * number), "attempt": 1, "loss": 3.0 - number}
        append_jsonl(run.metrics_file, {**record, "source": "log"})
    report = report_of(run)
    assert (report.spent["unmeasured"], report.goodput, report.num_records) == (8.0, None, 2)
    of_command = replace(report, status=replace(report.status, command=["python", "train.py"]))
    assert ["<tr><td>layout" in render_report(one) for one in (report, of_command)] == [True, False]


def test_no_spike_is_lost_and_a_cut_line_is_skipped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    count = NUM_BUCKETS * 20
    lines = [step(20 + number * 2, 1, number, loss=2.0) for number in range(1, count + 1)]
    lines[count // 2]["loss"] = 99.0
    lines[count // 3]["loss"] = None
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "lo')
    events = [
        event(0, 1, "started"),
        event(20, 1, "training", step=0),
        event(21 + 2 * count, 1, "finished", state="finished"),
    ]
    curves = read_curves(file, attempts_in(events))
    points = curves.series["loss"][1]
    assert (count // 2 + 1, 99.0) in points
    assert len(points) < 3 * NUM_BUCKETS
    assert curves.num_records == count
    assert curves.spent[1]["productive"] == pytest.approx(1.5 * count)
    assert curves.spent[1]["data_wait"] == pytest.approx(0.5 * count)
    assert (curves.spent[1]["startup"], curves.spent[1]["shutdown"]) == (20.0, 1.0)


def test_of_a_large_file_a_part_is_read(tmp_path, monkeypatch):
    file, count, first = tmp_path / "metrics.jsonl", NUM_BUCKETS * 20, 12_000
    lines = [
        step(20 + number * 2, 1 + number // first, number, loss=2.0, step_s=1.5)
        for number in range(1, count + 1)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [
        *(event(0, 1, "started"), event(20, 1, "training", step=0), event(21 + 2 * first, 1, "stopped")),
        *(event(19 + 2 * first, 2, "started"), event(20 + 2 * first, 2, "training", step=first - 1)),
        event(21 + 2 * count, 2, "finished", state="finished"),
    ]
    whole = read_curves(file, attempts_in(events))
    monkeypatch.setattr(goodput, "WHOLE_BYTES", 2**20)
    monkeypatch.setattr(goodput, "CHUNK_BYTES", 1000)
    part = read_curves(file, attempts_in(events))
    assert part.num_records == pytest.approx(whole.num_records, rel=0.05)
    for number, spent in whole.spent.items():
        assert part.spent[number] == pytest.approx(spent, abs=120)
    assert part.series["loss"][2][-1][0] > count - 20
    assert max(len(points) for points in part.series["loss"].values()) < 2 * NUM_BUCKETS


def test_the_size_of_a_page_does_not_grow_with_the_run(tmp_path):
    sizes = []
    for count in (3_750, 15_000):  # both counts have the same number of buckets
        run = RunDir(tmp_path / str(count))
        write_run(run, count)
        sizes.append(len(render_report(report_of(run))))
    assert sizes[1] < 1.1 * sizes[0] < 500_000


def test_a_secret_of_the_config_is_masked_by_the_name_of_its_key(run):
    text = render_report(replace(report_of(run), config={"launch.env.API_KEY": "hunter2", "train.steps": 4}))
    assert "<td>launch.env.API_KEY<td>***</tr>" in text
    assert "<td>train.steps<td>4</tr>" in text


def test_a_password_is_masked_up_to_the_end_of_its_text_and_an_image_not_at_all(run):
    image = '<img src="data:image/png;base64,AKIAIOSFODNN7EXAMPLE">'
    report = replace(report_of(run), provenance={"host": "AKIAIOSFODNN7EXAMPLE"}, sections={"Media": image})
    text = render_report(report)
    assert image in text
    assert text.count("AKIAIOSFODNN7EXAMPLE") == 1


class Page(HTMLParser):
    """Collects the references of a page, and fails on a tag that is closed but not open."""

    VOID = ("meta", "link", "br")
    OPTIONAL = ("th", "td")

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links, self.scripts = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        self.scripts += [dict(attrs).get("type")] if tag == "script" else []
        if tag not in self.VOID + self.OPTIONAL:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_well_formed_escaped_and_refers_to_nothing(run):
    argv = ["trainkit", "run", "postgres://me:hunter2@db/x"]
    text = render_report(replace(report_of(run), provenance={"argv": argv}))
    assert "postgres://me:***@db/x" in text
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.links == ["data:,"]
    assert page.scripts == ["application/json"] * 6 + [None]  # the data of the charts, and the page's own
    assert "&lt;script&gt;alert(1)" in text
    assert "url(" not in text
    assert "@import" not in text
    assert page.tags.count("path") >= 4


def test_an_interruption_is_marked_in_the_time_line(run):
    text = render_report(report_of(run))
    assert text.count('<i class="signal"') == 1  # attempt 1 failed, attempt 2 finished
    append_jsonl(run.events_file, event(30, 1, "signal", signal="SIGUSR2"))
    assert render_report(report_of(run)).count('<i class="signal"') == 2


def test_slow_ranks_are_named_with_host_phase_and_steps(run):
    slow = {"own_s": 0.25, "usual_s": 0.1, "phase": "data"}
    for record in (
        event(22, 1, "slow_rank", rank=1, host="node-b", step=21, since_step=11, **slow),
        event(23, 1, "slow_run", step=22, since_step=12, **{**slow, "phase": "network"}),
        event(24, 1, "slow_rank_over", rank=1, host="node-b", step=41, since_step=11, **slow),
        event(43, 2, "slow_rank", rank=1, host="node-c", step=61, since_step=51, **slow),
    ):
        append_jsonl(run.events_file, record)
    report = report_of(run)
    assert [
        (item.rank, item.host, item.phase, item.since_step, item.until_step)
        for item in report.added["slowdowns"]
    ] == [(1, "node-b", "data", 11, 41), (None, None, "network", 12, None), (1, "node-c", "data", 51, None)]
    assert report.to_dict()["slowdowns"][0]["noticed"] == iso(22)
    text = render_report(report)
    assert "<td>1<td>node-b<td>data" in text
    assert "No slow rank" not in text
    assert "No slow rank" in render_report(report_of_run_without(run, "slow_"))


def report_of_run_without(run, prefix):
    lines = [line for line in run.events_file.read_text().splitlines(True) if f'"{prefix}' not in line]
    run.events_file.write_text("".join(lines))
    return report_of(run)


NOT_ASKED = "nothing: only Slurm jobs request it"
UNKNOWN = "unknown: not measured"
BY_CGROUP = "3.0 GiB (peak sampled of the job's control group)"
BY_PROCESSES = "348.2 MiB (peak sampled of its processes)"


@pytest.mark.parametrize(
    ("percents", "used", "following"),
    [
        ((), "unknown", UNKNOWN),
        ((60, 80), "70 % busy on average", "the same number, because the GPUs were busy"),
        ((60, 79), "70 % busy on average", "before you request more GPUs, find out why these GPUs are idle"),
    ],
)
def test_gpus_that_wait_are_no_reason_to_ask_for_more(run, percents, used, following):
    write_json(run.plan_file, {"num_nodes": 1, "workers_per_node": 2, "world_size": 2, "device": "cuda"})
    (run.path / "health").mkdir()
    append_jsonl(health_file(run, "a"), {"gpus": [{"util_percent": percent} for percent in percents]})
    *_, found = report_of(run).advice
    assert (found.resource, found.used, found.next_time) == ("GPUs", used, following)


def sampled(*peaks, by="processes"):
    return [{"job_mem_gib": peak, "job_mem_by": by} for peak in peaks]


def advised(mem):
    return f"--set resources.mem={mem} (25 % above the peak sampled)"


@pytest.mark.parametrize(
    ("slurm", "samples", "used", "following"),
    [
        # A run on this machine requests nothing from Slurm.
        (None, sampled(0.34), BY_PROCESSES, NOT_ASKED),
        (None, [], "unknown", NOT_ASKED),
        ({}, [], "unknown", UNKNOWN),
        ({}, sampled(None, by=None), "unknown", UNKNOWN),
        ({}, sampled(3.0, 2.0, by="cgroup"), BY_CGROUP, advised("4G")),
        ({}, sampled(0.34), BY_PROCESSES, advised("1G")),
        ({}, sampled(0.0), "0 bytes (peak sampled of its processes)", None),
        ({}, sampled(1500.0, by=None), "1.5 TiB (peak sampled)", advised("1875G")),
    ],
)
def test_advice_on_memory(run, slurm, samples, used, following):
    plan = {"num_nodes": 1, "workers_per_node": 2, "world_size": 2, "device": "cpu", "slurm": slurm}
    write_json(run.plan_file, plan)
    (run.path / "health").mkdir()
    for sample in samples:
        append_jsonl(health_file(run, "a"), sample)
    time, memory = report_of(run).advice
    assert (memory.resource, memory.used) == ("Memory a node", used)
    assert following in (None, memory.next_time)
    assert (memory.asked == time.asked == "nothing") == (slurm is None)
    assert (time.next_time == NOT_ASKED) == (slurm is None)
    assert memory.next_time.startswith("--set resources.mem=0") is False
