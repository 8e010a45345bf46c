"""Tests the call of one Slurm command, the meaning of its messages, and how its records are parsed."""

import time
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.said import said
from trainkit.errors import UsageError
from trainkit.slurm import client
from trainkit.slurm.client import (
    FIELD,
    RECORD,
    SlurmRefused,
    SlurmUnreachable,
    cleaned,
    failure,
    query,
    records,
    run_slurm,
    seconds_of,
    time_of,
)


def test_arguments_are_never_read_by_a_shell(fake):
    hostile = ["squeue", "--name=a b", "$(touch x)", "`id`", "'\"", "a\nb", "; exit 3", "ü"]
    fake.add("squeue")
    run_slurm(hostile, 60, environ=fake.environ)
    assert fake.calls == [hostile]


def test_out_and_err_are_kept_apart(fake):
    fake.add("squeue", r"printf 'a\377b\n'; echo err >&2")
    assert run_slurm(["squeue"], 60, environ=fake.environ, with_stderr=True) == "err\na\ufffdb\n"
    assert run_slurm(["squeue"], 60, environ=fake.environ) == "a\ufffdb\n"
    # The command has no input.
    fake.add("sbatch", 'read line; echo "got $line"')
    assert run_slurm(["sbatch"], 60, environ=fake.environ) == "got \n"


def test_program_missing(fake):
    with pytest.raises(UsageError, match="`sbatch` is not on PATH") as caught:
        run_slurm(["sbatch"], 60, environ=fake.environ)
    assert "--backend local" in caught.value.hint
    assert caught.value.exit_code == 2


FAILURES = {
    "sbatch: error: Batch job submission failed: Invalid qos specification": (SlurmRefused, "--qos"),
    "slurm_load_jobs error: Unable to contact slurm controller (connect failure)": (SlurmUnreachable, "ping"),
    "Invalid job id specified": (SlurmRefused, "squeue"),
}


@pytest.mark.parametrize("stream", [1, 2])
@pytest.mark.parametrize("printed", FAILURES)
def test_failures(fake, printed, stream):
    """Words on stdout count when there are no others."""
    kind, hint = FAILURES[printed]
    fake.add("sbatch", f"echo '{printed}' >&{stream}; exit 1")
    with pytest.raises(kind) as caught:
        run_slurm(["sbatch"], 60, environ=fake.environ)
    assert caught.value.exit_code == (2 if kind is SlurmRefused else 3)
    assert hint in caught.value.hint
    said(caught.value.message)
    if kind is SlurmRefused:
        said(caught.value.sentence)
    else:
        assert not caught.value.may_have_arrived


def test_no_answer_in_time(fake):
    fake.add("sbatch", "echo 'sbatch: error: still trying' >&2; exec /bin/sleep 30")
    begin = time.monotonic()
    with pytest.raises(SlurmUnreachable, match=r"`sbatch` did not answer within 2 s: still trying") as caught:
        run_slurm(["sbatch"], 2.0, environ=fake.environ)
    assert time.monotonic() - begin < 7
    assert caught.value.exit_code == 3
    assert caught.value.may_have_arrived


def test_a_query_is_repeated_while_slurm_is_away_not_when_it_is_refused(fake):
    fake.add("squeue", "[ $n -ge 3 ] && { echo there; exit; }; echo '(connect failure)' >&2; exit 1")
    assert query(["squeue"], environ=fake.environ) == "there\n"
    assert len(fake.calls) == 3
    fake.add("squeue", "echo 'Invalid job id specified' >&2; exit 1")
    with pytest.raises(SlurmRefused):
        query(["squeue"], environ=fake.environ)
    assert len(fake.calls) == 4


def test_what_the_user_prefers_to_see_does_not_matter(fake):
    shown = 'echo "$SQUEUE_STATES,$SQUEUE_FORMAT,$SLURM_TIME_FORMAT,$SLURM_BITSTR_LEN,$SLURM_CONF"'
    fake.add("squeue", shown)
    preferred = {"SQUEUE_STATES": "R", "SQUEUE_FORMAT": "%i", "SLURM_CONF": "/c"}
    preferred["SLURM_TIME_FORMAT"] = "relative"
    assert query(["squeue"], environ={**fake.environ, **preferred}) == ",,%s,0,/c\n"


def test_failure_without_a_word():
    said(failure("squeue", 7, "").message)
    killed = failure("sbatch", -9, "")
    assert isinstance(killed, SlurmUnreachable)
    assert killed.may_have_arrived


def test_pauses_grow(monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr("trainkit.slurm.client.time.sleep", pauses.append)

    def ask() -> str:
        if len(pauses) < 6:
            raise SlurmUnreachable("away")
        return "there"

    assert client.retrying(ask, patience_s=100.0) == "there"
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_patience_is_measured_by_the_clock():
    """A command that has waited for a silent controller does not wait a second time."""
    asked = []

    def ask() -> None:
        asked.append(None)
        time.sleep(0.2)
        raise SlurmUnreachable("away")

    with pytest.raises(SlurmUnreachable, match="away"):
        client.retrying(ask, patience_s=0.6)
    assert len(asked) == 1


def test_values_that_could_be_options():
    for value in ("", "-x", "--all", "a\0b"):
        with pytest.raises(UsageError):
            client.safe_value(value, "a host list")
    with pytest.raises(UsageError, match="NUL"):
        run_slurm(["sh", "a\0b"], 5)


def test_queries_in_a_row_do_not_each_wait_for_a_controller_that_is_away(fake, monkeypatch):
    monkeypatch.setattr(client, "SHORT_TIMEOUT_S", 0.2)
    fake.add("squeue", "exec /bin/sleep 30")
    begin = time.monotonic()
    with pytest.raises(SlurmUnreachable, match=r"did not answer within 1 s"):
        query(["squeue"], timeout_s=1.0, environ=fake.environ, patience_s=0.0)
    for _ in range(3):
        with pytest.raises(SlurmUnreachable, match=r"did not answer within 0.2 s"):
            query(["squeue"], environ=fake.environ)
    assert time.monotonic() - begin < 5
    assert len(fake.calls) == 4
    # A job waits patiently, and an answer ends the wait.
    with pytest.raises(SlurmUnreachable, match=r"did not answer within 0.2 s"):
        run_slurm(["squeue"], client.QUERY_TIMEOUT_S, environ=fake.environ)
    fake.add("squeue", "exec /bin/sleep 0.6")
    run_slurm(["squeue"], client.JOB_TIMEOUT_S, environ=fake.environ)
    run_slurm(["squeue"], client.QUERY_TIMEOUT_S, environ=fake.environ)
    # A command has ended after a quarter of a minute.
    assert client.QUERY_TIMEOUT_S + client.SHORT_TIMEOUT_S < 14
    assert client.QUERY_TIMEOUT_S < client.JOB_TIMEOUT_S


SUBMIT = "sbatch: error: Batch job submission failed: "
RETRYING = "Slurm temporarily unable to accept job, sleeping and retrying"
LOST, AWAY, REFUSED = "the answer was lost", "nothing was requested", "refused"


NOT_SENT = {
    AWAY: (
        f"{SUBMIT}Unable to contact slurm controller (connect failure)",
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        f"{SUBMIT}Connection timed out establishing",
        f"{SUBMIT}Resource temporarily unavailable",
        f"sbatch: error: {RETRYING}\n{SUBMIT}Resource temporarily unavailable",
        f"{SUBMIT}Rate limit exceeded, please retry momentarily",
        f"{SUBMIT}System submissions disabled",
        "scontrol: fatal: Could not establish a configuration source",
        "sacct: error: Problem talking to the database: Connection refused",
    ),
    LOST: (
        f"{SUBMIT}Unable to contact slurm controller (send failure)",
        f"{SUBMIT}Unable to contact slurm controller (receive failure)",
        f"{SUBMIT}Socket timed out on send/recv operation",
        f"{SUBMIT}Zero Bytes were transmitted or received",
        f"{SUBMIT}Connection timed out reading",
        f"{SUBMIT}Unexpected message received",
        f"{SUBMIT}Protocol authentication error",
        "sbatch: error: If munged is up, restart it\nsbatch: error: Munge encode failed: x",
        "sacct: error: Sending PersistInit msg: Connection timed out",
        # The first controller accepted the job and the second did not answer, so the job may exist.
        "sbatch: error: Socket timed out on send/recv operation\nsbatch: error: x (connect failure)",
    ),
    REFUSED: (
        f"sbatch: error: {RETRYING}\n{SUBMIT}Invalid qos specification",
        f"{SUBMIT}Invalid partition name specified",
        f"{SUBMIT}Requested time limit is invalid (missing or exceeds)",
        *("sbatch: unrecognized option '--foo'", "words that nobody has seen", ""),
    ),
}


@pytest.mark.parametrize(
    ("kind", "words"), [(kind, each) for kind, words in NOT_SENT.items() for each in words]
)
def test_trouble(words, kind):
    found = failure("sbatch", 1, words)
    assert kind == (REFUSED if isinstance(found, SlurmRefused) else LOST if found.may_have_arrived else AWAY)


def test_cleaned():
    words = (
        f"sbatch: error: invalid partition specified: nope\n{SUBMIT}Invalid partition name specified\n\n"
        f'{SUBMIT}Invalid partition name specified\nTry "sbatch --help" for more information\n'
    )
    more = ("slurm_load_jobs error: Invalid job id specified\n", "sbatch: fatal: Could not establish it")
    for text in (words, *more, "sbatch: Job 3 to start at noon", "a site's own word: error: x"):
        said(cleaned(text))


HINTS = {
    "Invalid partition name specified": "sinfo -s",
    "No partition specified or system default partition": "no default partition",
    "Invalid account or account/partition combination specified": "sacctmgr show associations",
    "Invalid qos specification": "--qos",
    "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)": "limit",
    "Requested time limit is invalid (missing or exceeds some limit)": "MaxTime",
    "Requested node configuration is not available": "sinfo -o",
    "Node count specification invalid": "--nodes",
    "Invalid generic resource (gres) specification": "%G",
    "Invalid feature specification": "%f",
    "Requested reservation is invalid": "scontrol show reservation",
    "Job dependency problem": "a dependency of the job",
    "Invalid job array specification": "MaxArraySize",
    "sbatch: unrecognized option '--foo'": "sbatch --help",
    "Pathname of a file, directory or other parameter too long": "--run-dir",
    "Invalid job id specified": "squeue --me",
    "Requested operation is presently disabled": "--no-requeue",
    "Unable to contact slurm controller (connect failure)": "scontrol ping",
    "Could not establish a configuration source": "SLURM_CONF",
    "Protocol authentication error": "munge",
    "Problem talking to the database: Connection refused": "accounting",
}


def test_hints():
    hints = {words: failure("sbatch", 1, words).hint for words in HINTS}
    assert [words for words, hint in hints.items() if HINTS[words] not in hint] == []
    assert failure("sbatch", 1, "the site's plugin says no").hint == ""


PLAIN = st.text(st.characters(blacklist_characters=FIELD + RECORD + "\n", blacklist_categories=["Cs"]))
NAME = st.text(st.characters(blacklist_categories=["Cs"])).filter(lambda name: f"{RECORD}\n" not in name)


@given(st.lists(st.tuples(PLAIN, PLAIN, NAME)))
def test_any_name_comes_back(rows):
    text = "".join(FIELD.join(row) + RECORD + "\n" for row in rows)
    assert [tuple(row) for row in records(text, 3)] == rows


def test_names_of_clusters_and_what_is_cut_off_are_left_out():
    text = f"CLUSTER: west\n1{FIELD}a{RECORD}\nCLUSTER: east\n2{FIELD}b{RECORD}\n3"
    assert list(records(text, 2)) == [["1", "a"], ["2", "b"]]
    assert list(records("", 2)) == []


def test_times():
    assert time_of("1700000000") == datetime(2023, 11, 14, 22, 13, 20, tzinfo=timezone.utc)
    unknown = ("N/A", "Unknown", "None", "", "0", "2024-01-01T00:00:00")
    assert {time_of(text) for text in unknown} == {None}
    spans = {"0:05": 5, "05:00": 300, "1:00:00": 3600, "2-03:04:05": 183845, "10-00:00:00": 864000}
    assert {text: seconds_of(text) for text in spans} == spans
    unlimited = "UNLIMITED INVALID NOT_SET N/A NONE infinite 5 -1:00 a-1:00:00"
    assert {seconds_of(text) for text in ["", *unlimited.split()]} == {None}
