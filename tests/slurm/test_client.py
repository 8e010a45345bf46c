"""Tests the call of one Slurm command: its input, its output, and the errors for its failures."""

import time

import pytest

from tests.support.said import said
from trainkit.errors import UsageError
from trainkit.slurm import client
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable, failure, query, run_slurm


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
