"""Tests that a script is submitted once, with fake commands that lose answers, refuse and recover."""

import time

import pytest

from tests.support.said import said
from trainkit.slurm import submit
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable
from trainkit.slurm.submit import find_by_token, parse_start_estimate, query_start, submit_script

MARK = "trainkit:5eed"
FAILS = "echo 'sbatch: error: Batch job submission failed: {}' >&2; exit 1"
LOST = FAILS.format("Socket timed out on send/recv operation")
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
    short = {"SETTLE_S": 0.6, "POLL_INTERVAL_S": 0.1, "FIRST_PAUSE_S": 0.1}
    for name, value in {"time": Clock(), **short}.items():
        monkeypatch.setattr(submit, name, value)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "a b;'$(exit).sbatch"
    path.write_text(f"#!/bin/bash\n#SBATCH --comment={MARK}\n")
    return path


def send(script, *clusters, notify=print, **more):
    given = {"token": MARK, "cwd": script.parent, "clusters": clusters, "notify": notify, **more}
    return submit_script(script, **given)


MINE = f"{LISTING} 9 $(/bin/date +%s) {MARK} /x"
OTHER = f"{LISTING} 4821 $(/bin/date +%s) trainkit:0ther /y"
AWAY_TWICE = f"[ $n -ge 3 ] || {{ {AWAY}; }}"
SUBMISSIONS = {
    "answered": ("echo 4711", "", "4711", "sbatch"),
    "a site that prints to stderr": (
        "echo '4711;west'; echo note >&2; echo 12 >&2",
        "",
        "4711;west",
        "sbatch",
    ),
    **{
        f"site: {printed}": (f"printf '{printed}'; echo 7 >&2", MINE, "9", "sbatch squeue")
        for printed in (
            *("Balance (SUs):\\n4821\\n--> OK\\n9\\n", "9\\n4821\\n", "4821\\n9\\nbye\\n", "4821\\n4822\\n"),
            *("9\\n9\\n", "4821;west\\n9\\n", "Submitted batch job 9\\n", "Balance: 4821\\n"),
        )
    },
    "another job that is new, too": (
        *("echo 4821; echo 9", f"[ $n -lt 4 ] || {MINE}; {OTHER}", "9", "sbatch" + 4 * " squeue"),
    ),
    "no answer, but a job": ("true", MINE, "9", "sbatch squeue"),
    "that job is of an earlier run of the same name": (
        *(f"[ $n -gt 1 ] && echo 12 || {{ {LOST}; }}", f"{LISTING} 8 1700000000 {MARK} /x", "12", None),
    ),
    "shows later": (LOST, f"[ $n -lt 4 ] || {MINE}", "9", "sbatch" + 4 * " squeue"),
    "restarts": (LOST, f"{AWAY_TWICE}; {MINE}", "9", "sbatch" + 3 * " squeue"),
    "denied, then away for longer than it takes to settle": (
        *(LOST, f"[ $n = 1 ] && exit; [ $n -ge 9 ] || {{ {AWAY}; }}; {MINE}", "9", "sbatch" + 9 * " squeue"),
    ),
    "not delivered": (f"{AWAY_TWICE}; echo 5", "", "5", "sbatch squeue sbatch squeue sbatch"),
    "no answer": ("exec /bin/sleep 30", MINE, "9", "sbatch squeue"),
    "no id in the answer": ("echo 'a filter ate it'", MINE, "9", "sbatch squeue"),
}


@pytest.mark.parametrize(("sbatch", "squeue", "job_id", "programs"), SUBMISSIONS.values(), ids=SUBMISSIONS)
def test_submitted_once(fake, script, monkeypatch, sbatch, squeue, job_id, programs):
    monkeypatch.setattr(submit, "SUBMIT_TIMEOUT_S", 2.0)
    fake.add("sbatch", sbatch)
    fake.add("squeue", squeue)
    assert send(script) == job_id
    assert fake.calls[0] == ["sbatch", "--parsable", str(script)]
    assert programs in (None, " ".join(fake.programs))


def test_the_environment_is_scrubbed_and_the_folder_is_the_callers(fake, script, monkeypatch):
    seen = '"$SBATCH_PARTITION,$SLURM_JOB_ID,$SLURM_CONF,$HOME,$(pwd)"'
    fake.add("sbatch", f'echo {seen} > "$here/seen"; echo 1')
    for name, value in {
        "SBATCH_PARTITION": "x",
        "SLURM_JOB_ID": "7",
        "SLURM_CONF": "/c",
        "HOME": "/h",
    }.items():
        monkeypatch.setenv(name, value)
    send(script, extra_argv=["--hold"])
    assert (fake.folder / "seen").read_text() == f",,/c,/h,{script.parent}\n"
    assert fake.calls == [["sbatch", "--parsable", "--hold", str(script)]]


def test_a_refusal_is_final(fake, script):
    fake.add("sbatch", FAILS.format("Invalid qos specification"))
    with pytest.raises(SlurmRefused, match="sbatch: Invalid qos specification"):
        send(script)
    assert fake.programs == ["sbatch"]


def test_answer_lost_and_the_job_is_there(fake, script):
    fake.add("sbatch", LOST)
    fake.add("squeue", f"{LISTING} 8 1700000000 other /x; {LISTING} 9 $(/bin/date +%s) 'of mine {MARK}' /y")
    notices = []
    assert send(script, notify=notices.append) == "9"
    assert fake.programs == ["sbatch", "squeue"]
    [notice] = notices
    said(notice)


def test_answer_lost_and_denied_for_long_enough(fake, script):
    fake.add("sbatch", f"[ $n -ge 2 ] || {{ {LOST}; }}; echo 5")
    fake.add("squeue")
    assert send(script) == "5"
    looks = len(fake.programs) - 2
    assert fake.programs == ["sbatch", *["squeue"] * looks, "sbatch"]
    assert looks >= 4, "the job may take a while to show"


@pytest.mark.parametrize(
    ("sbatch", "squeue", "message", "may_have_arrived"),
    [
        (AWAY, AWAY, "sbatch cannot reach Slurm: Unable to contact", False),
        (LOST, AWAY, "may or may not have been submitted", True),
        (LOST, "", "Socket timed out", False),  # squeue has denied it
    ],
    ids=["away for good", "an open question", "lost again and again"],
)
def test_slurm_does_not_come_back(fake, script, monkeypatch, sbatch, squeue, message, may_have_arrived):
    monkeypatch.setattr(submit, "SUBMIT_PATIENCE_S", 0.5 if squeue else 1.0)
    fake.add("sbatch", sbatch)
    fake.add("squeue", squeue)
    with pytest.raises(SlurmUnreachable, match=message) as caught:
        send(script)
    assert (caught.value.may_have_arrived, caught.value.exit_code) == (may_have_arrived, 3)
    assert not squeue or fake.programs.count("sbatch") == 1
    if may_have_arrived:
        assert str(script) in caught.value.message
        assert "squeue --me" in caught.value.hint


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
    assert send(script, is_only_job=False) == "9"


@pytest.mark.parametrize("printed", ["", "Welcome", "4821\n--> OK", "4821\n4822"])
def test_an_accepted_job_that_is_not_listed(fake, script, printed):
    fake.add("sbatch", f"printf '{printed}'")
    fake.add("squeue", f"{LISTING} 4821 1700000000 x /x")
    with pytest.raises(SlurmUnreachable, match="Slurm does not list a") as caught:
        send(script)
    assert caught.value.may_have_arrived
    assert "squeue --me" in caught.value.hint
    assert fake.programs.count("sbatch") == 1


def test_several_clusters(fake, script, monkeypatch):
    monkeypatch.setenv("SLURM_CLUSTERS", "north")
    answer = f'[ $n = 1 ] && echo "4;east" || {{ {LOST}; }}'
    fake.add("sbatch", f'echo "$SLURM_CLUSTERS" > "$here/variable"; {answer}')
    fake.add("squeue", f"case $1 in *=east) {MINE};; esac")
    assert send(script, "west", "east") == "4;east"
    assert (fake.folder / "variable").read_text() == "\n"
    assert send(script, "west", "east") == "9;east"
    calls = [["sbatch", "--clusters=west,east"]] * 2
    calls += [["squeue", f"--clusters={one}"] for one in ("west", "east")]
    assert [call[:2] for call in fake.calls] == calls


def test_a_job_is_found_while_another_cluster_is_away(fake):
    fake.add("squeue", f"case $1 in *=west) {AWAY};; *=east) {MINE};; esac")
    assert find_by_token(MARK, clusters=["west", "east"]) == "9;east"
    with pytest.raises(SlurmUnreachable):
        find_by_token(MARK, clusters=["west", "north"])


@pytest.mark.parametrize("token", ["", "two words", "a\nb", "a,b", "ä", "$(x)"])
def test_a_token_is_one_word(token, script):
    with pytest.raises(ValueError, match="a token must be one word"):
        send(script, token=token)


def test_find_marked(fake):
    fake.add("squeue", f"{LISTING} 8 1 {MARK}0 /x; {LISTING} 9 1 'a {MARK}' /x; {LISTING} 10 1 '(null)' /x")
    assert find_by_token(MARK) == "9"
    assert find_by_token("trainkit:5ee") is None
    assert fake.calls[0][1:4] == ["--me", "--noheader", "--states=all"]


def test_would_start(fake):
    answer = "sbatch: Job 3 to start at 1700000000 using 16 processors on nodes n[2,1] in partition a"
    fake.add("sbatch", f"echo '{answer}' >&2")
    found, message = query_start("#!/bin/sh\n")
    assert fake.calls[0][:-1] == ["sbatch", "--test-only"]
    assert (found.start_time.isoformat(), found.nodes) == ("2023-11-14T22:13:20+00:00", ("n2", "n1"))
    assert message.startswith("Job 3 to start at 2023-11-1")
    found, _ = parse_start_estimate("sbatch: Job 3 to start at Unknown using 16 processors on n1")
    assert (found.start_time, found.nodes) == (None, ("n1",))
    # Slurm 26.05 prints the estimate in this form.
    answer = (
        "Job 6 to start at 1700000000 on cluster east a using 2 processors on nodes n[1-2] in partition a"
    )
    found, message = parse_start_estimate(f"sbatch: {answer}")
    assert (found.nodes, "on cluster east" in message) == (("n1", "n2"), True)


def test_would_not_start(fake):
    fake.add("sbatch", "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1")
    with pytest.raises(SlurmRefused, match="Requested node configuration is not available"):
        query_start("#!/bin/sh\n")
    with pytest.raises(SlurmRefused, match="cannot parse the output of sbatch --test-only: 'hm'"):
        parse_start_estimate("hm\n")
