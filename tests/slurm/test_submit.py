"""Tests that a script is submitted once, with fake commands that lose answers, refuse and recover."""

import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tests.support.said import said
from trainkit.slurm import submit
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable
from trainkit.slurm.submit import find_by_token, parse_start_estimate, query_start, submit_script

MARK = "trainkit:5eed"
LOST = (
    "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
)
AWAY = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"
LISTING = r"printf '%s\037%s\037%s\037%s\036\n'"
"""Prints a job as squeue does: the array's id, time of submission, comment and script."""


class Clock:
    """Replaces the module `time`. The time advances only during a sleep."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(submit, "time", Clock())
    monkeypatch.setattr(submit, "SETTLE_S", 0.6)
    monkeypatch.setattr(submit, "POLL_INTERVAL_S", 0.1)
    monkeypatch.setattr(submit, "FIRST_PAUSE_S", 0.1)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "a b;'$(exit).sbatch"
    path.write_text(f"#!/bin/bash\n#SBATCH --comment={MARK}\n")
    return path


def send(script: Path, *clusters: str) -> str:
    return submit_script(script, token=MARK, cwd=script.parent, clusters=clusters, notify=print)


MINE = f"{LISTING} 9 $(/bin/date +%s) {MARK} /x"


@pytest.mark.parametrize(
    ("sbatch", "squeue", "job_id", "programs"),
    [
        pytest.param("echo 4711", "", "4711", "sbatch", id="answered"),
        pytest.param(
            "echo '4711;west'; echo note >&2; echo 12 >&2",
            "",
            "4711;west",
            "sbatch",
            id="a site that prints to stderr",
        ),
        *(
            pytest.param(f"printf '{printed}'; echo 7 >&2", MINE, "9", "sbatch squeue", id=f"site: {printed}")
            for printed in (
                "Balance (SUs):\\n4821\\n--> OK\\n9\\n",
                "9\\n4821\\n",
                "4821\\n9\\nbye\\n",
                "4821\\n4822\\n",
                "9\\n9\\n",
                "4821;west\\n9\\n",
                "Submitted batch job 9\\n",
                "Balance: 4821\\n",
            )
        ),
        pytest.param(
            "echo 4821; echo 9",
            f"[ $n -lt 4 ] || {MINE}; {LISTING} 4821 $(/bin/date +%s) trainkit:0ther /y",
            "9",
            "sbatch" + 4 * " squeue",
            id="another job that is new, too",
        ),
        pytest.param("true", MINE, "9", "sbatch squeue", id="no answer, but a job"),
        pytest.param(
            f"[ $n -gt 1 ] && echo 12 || {{ {LOST}; }}",
            f"{LISTING} 8 1700000000 {MARK} /x",
            "12",
            None,
            id="that job is of an earlier run of the same name",
        ),
        pytest.param(LOST, f"[ $n -lt 4 ] || {MINE}", "9", "sbatch" + 4 * " squeue", id="shows later"),
        pytest.param(
            LOST, f"[ $n -ge 3 ] || {{ {AWAY}; }}; {MINE}", "9", "sbatch" + 3 * " squeue", id="restarts"
        ),
        pytest.param(
            LOST,
            f"[ $n = 1 ] && exit; [ $n -ge 9 ] || {{ {AWAY}; }}; {MINE}",
            "9",
            "sbatch" + 9 * " squeue",
            id="denied, then away for longer than it takes to settle",
        ),
        pytest.param(
            f"[ $n -ge 3 ] || {{ {AWAY}; }}; echo 5",
            "",
            "5",
            "sbatch squeue sbatch squeue sbatch",
            id="not delivered",
        ),
        pytest.param("exec /bin/sleep 30", MINE, "9", "sbatch squeue", id="no answer"),
        pytest.param("echo 'a filter ate it'", MINE, "9", "sbatch squeue", id="no id in the answer"),
    ],
)
def test_submitted_once(fake, script, monkeypatch, sbatch, squeue, job_id, programs):
    monkeypatch.setattr(submit, "SUBMIT_TIMEOUT_S", 2.0)
    fake.add("sbatch", sbatch)
    fake.add("squeue", squeue)
    assert send(script) == job_id
    assert fake.calls[0] == ["sbatch", "--parsable", str(script)]
    assert programs in (None, " ".join(fake.programs))


def test_the_environment_is_scrubbed_and_the_folder_is_the_callers(fake, script, monkeypatch):
    fake.add(
        "sbatch", 'echo "$SBATCH_PARTITION,$SLURM_JOB_ID,$SLURM_CONF,$HOME,$(pwd)" > "$here/seen"; echo 1'
    )
    variables = {"SBATCH_PARTITION": "x", "SLURM_JOB_ID": "7", "SLURM_CONF": "/c", "HOME": "/h"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    submit_script(script, token=MARK, cwd=script.parent, extra_argv=["--hold"], notify=print)
    assert (fake.folder / "seen").read_text() == f",,/c,/h,{script.parent}\n"
    assert fake.calls == [["sbatch", "--parsable", "--hold", str(script)]]


def test_a_refusal_is_final(fake, script):
    fake.add(
        "sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid qos specification' >&2; exit 1"
    )
    with pytest.raises(SlurmRefused, match="sbatch: Invalid qos specification"):
        send(script)
    assert fake.programs == ["sbatch"]


def test_answer_lost_and_the_job_is_there(fake, script):
    fake.add("sbatch", LOST)
    fake.add("squeue", f"{LISTING} 8 1700000000 other /x; {LISTING} 9 $(/bin/date +%s) 'of mine {MARK}' /y")
    notices: list[str] = []
    found = submit_script(script, token=MARK, cwd=script.parent, notify=notices.append)
    assert found == "9"
    assert fake.programs == ["sbatch", "squeue"]
    [notice] = notices
    said(notice)


def test_answer_lost_and_denied_for_long_enough(fake, script):
    fake.add("sbatch", f"[ $n -ge 2 ] || {{ {LOST}; }}; echo 5")
    fake.add("squeue")
    assert send(script) == "5"
    looks = fake.programs[1:-1]
    assert fake.programs == ["sbatch", *looks, "sbatch"]
    assert looks == ["squeue"] * len(looks)
    assert len(looks) >= 4, "the job may take a while to show"


def test_away_for_good(fake, script, monkeypatch):
    monkeypatch.setattr("trainkit.slurm.submit.SUBMIT_PATIENCE_S", 0.5)
    fake.add("sbatch", AWAY)
    fake.add("squeue", AWAY)
    with pytest.raises(SlurmUnreachable, match="sbatch cannot reach Slurm: Unable to contact") as caught:
        send(script)
    assert not caught.value.may_have_arrived
    assert fake.programs.count("sbatch") == 1


def test_an_open_question_is_said(fake, script, monkeypatch):
    monkeypatch.setattr("trainkit.slurm.submit.SUBMIT_PATIENCE_S", 0.5)
    fake.add("sbatch", LOST)
    fake.add("squeue", AWAY)
    with pytest.raises(SlurmUnreachable, match="may or may not have been submitted") as caught:
        send(script)
    assert caught.value.may_have_arrived
    assert caught.value.exit_code == 3
    assert str(script) in caught.value.message
    assert "squeue --me" in caught.value.hint
    assert fake.programs.count("sbatch") == 1


def test_lost_again_and_again_ends(fake, script, monkeypatch):
    monkeypatch.setattr("trainkit.slurm.submit.SUBMIT_PATIENCE_S", 1.0)
    fake.add("sbatch", LOST)
    fake.add("squeue")
    with pytest.raises(SlurmUnreachable, match="Socket timed out") as caught:
        send(script)
    assert not caught.value.may_have_arrived, "squeue has denied it"


def test_a_site_that_rewrites_comments(fake, script):
    """A job without its token is recognized by its script. An older job of the same script does not count."""
    fake.add("sbatch", LOST)
    fake.add(
        "squeue",
        'script="$(/bin/cat "$here/script")"; now=$(/bin/date +%s);'
        f'{LISTING} 7 1700000000 rewritten "$script"; {LISTING} 8 $now x "$script y";'
        f'{LISTING} 9 $now rewritten "$script"',
    )
    (fake.folder / "script").write_text(str(script))
    assert send(script) == "9"


def test_a_site_that_rewrites_comments_and_prints_more(fake, script):
    now = "$(/bin/date +%s)"
    fake.add("sbatch", "echo 4821; echo 9; echo 7")
    fake.add("squeue", f"{LISTING} 4821 1700000000 x /x; {LISTING} 8 {now} x /x; {LISTING} 9 {now} x /x")
    more = {"token": MARK, "cwd": script.parent, "notify": print}
    assert submit_script(script, is_only_job=False, **more) == "9"


@pytest.mark.parametrize("printed", ["", "Welcome", "4821\n--> OK", "4821\n4822"])
def test_an_accepted_job_that_is_not_listed(fake, script, printed):
    fake.add("sbatch", f"printf '{printed}'")
    fake.add("squeue", f"{LISTING} 4821 1700000000 x /x")
    with pytest.raises(SlurmUnreachable, match="Slurm lists no") as caught:
        send(script)
    assert caught.value.may_have_arrived
    assert "squeue --me" in caught.value.hint
    assert fake.programs.count("sbatch") == 1


def test_several_clusters(fake, script, monkeypatch):
    monkeypatch.setenv("SLURM_CLUSTERS", "north")
    fake.add(
        "sbatch",
        f'echo "$SLURM_CLUSTERS" > "{fake.folder}/variable"; [ $n = 1 ] && echo "4;east" || {{ {LOST}; }}',
    )
    fake.add("squeue", f"case $1 in *=east) {MINE};; esac")
    assert send(script, "west", "east") == "4;east"
    assert (fake.folder / "variable").read_text() == "\n"
    assert send(script, "west", "east") == "9;east"
    assert [call[:2] for call in fake.calls] == [
        *[["sbatch", "--clusters=west,east"]] * 2,
        ["squeue", "--clusters=west"],
        ["squeue", "--clusters=east"],
    ]


def test_a_job_is_found_while_another_cluster_is_away(fake):
    fake.add("squeue", f"case $1 in *=west) {AWAY};; *=east) {MINE};; esac")
    assert find_by_token(MARK, clusters=["west", "east"]) == "9;east"
    with pytest.raises(SlurmUnreachable):
        find_by_token(MARK, clusters=["west", "north"])


@pytest.mark.parametrize("token", ["", "two words", "a\nb", "a,b", "ä", "$(x)"])
def test_a_token_is_one_word(token, script):
    with pytest.raises(ValueError, match="a token must be one word"):
        submit_script(script, token=token, cwd=script.parent, notify=print)


def test_find_marked(fake):
    fake.add("squeue", f"{LISTING} 8 1 {MARK}0 /x; {LISTING} 9 1 'a {MARK}' /x; {LISTING} 10 1 '(null)' /x")
    assert find_by_token(MARK) == "9"
    assert find_by_token("trainkit:5ee") is None
    assert fake.calls[0][1:4] == ["--me", "--noheader", "--states=all"]


def test_would_start(fake):
    fake.add(
        "sbatch",
        "echo 'sbatch: Job 3 to start at 1700000000 using 16 processors on nodes n[2,1] in partition a' >&2",
    )
    answer, message = query_start("#!/bin/sh\n")
    assert fake.calls[0][:-1] == ["sbatch", "--test-only"]
    assert answer.start_time == datetime(2023, 11, 14, 22, 13, 20, tzinfo=timezone.utc)
    assert answer.nodes == ("n2", "n1")
    assert message.startswith("Job 3 to start at 2023-11-1")


def test_would_start_elsewhere():
    answer, _ = parse_start_estimate("sbatch: Job 3 to start at Unknown using 16 processors on n1")
    assert (answer.start_time, answer.nodes) == (None, ("n1",))
    # Slurm 26.05 prints it in this form.
    text = "Job 6 to start at 1700000000 on cluster east a using 2 processors on nodes n[1-2] in partition a"
    answer, message = parse_start_estimate(f"sbatch: {text}")
    assert (answer.nodes, "on cluster east" in message) == (("n1", "n2"), True)


def test_would_not_start(fake):
    fake.add("sbatch", "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1")
    with pytest.raises(SlurmRefused, match="Requested node configuration is not available"):
        query_start("#!/bin/sh\n")
    with pytest.raises(SlurmRefused, match="cannot parse the output of sbatch --test-only: 'hm'"):
        parse_start_estimate("hm\n")
