"""Tests the meaning of Slurm's messages: refused, not delivered, or answer lost.

It also tests how Slurm's records are parsed.
"""

from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.said import said
from trainkit.slurm.client import FIELD, RECORD, SlurmRefused, cleaned, failure, records, seconds_of, time_of

SUBMIT = "sbatch: error: Batch job submission failed: "
RETRYING = "Slurm temporarily unable to accept job, sleeping and retrying"
LOST, AWAY, REFUSED = "the answer was lost", "nothing was requested", "refused"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (f"{SUBMIT}Unable to contact slurm controller (connect failure)", AWAY),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", AWAY),
        (f"{SUBMIT}Unable to contact slurm controller (send failure)", LOST),
        (f"{SUBMIT}Unable to contact slurm controller (receive failure)", LOST),
        (f"{SUBMIT}Socket timed out on send/recv operation", LOST),
        (f"{SUBMIT}Zero Bytes were transmitted or received", LOST),
        (f"{SUBMIT}Connection timed out reading", LOST),
        (f"{SUBMIT}Connection timed out establishing", AWAY),
        (f"{SUBMIT}Unexpected message received", LOST),
        (f"{SUBMIT}Protocol authentication error", LOST),
        ("sbatch: error: If munged is up, restart it\nsbatch: error: Munge encode failed: x", LOST),
        (f"{SUBMIT}Resource temporarily unavailable", AWAY),
        (f"sbatch: error: {RETRYING}\n{SUBMIT}Resource temporarily unavailable", AWAY),
        (f"sbatch: error: {RETRYING}\n{SUBMIT}Invalid qos specification", REFUSED),
        (f"{SUBMIT}Rate limit exceeded, please retry momentarily", AWAY),
        (f"{SUBMIT}System submissions disabled", AWAY),
        ("scontrol: fatal: Could not establish a configuration source", AWAY),
        ("sacct: error: Problem talking to the database: Connection refused", AWAY),
        ("sacct: error: Sending PersistInit msg: Connection timed out", LOST),
        (f"{SUBMIT}Invalid partition name specified", REFUSED),
        (f"{SUBMIT}Requested time limit is invalid (missing or exceeds)", REFUSED),
        ("sbatch: unrecognized option '--foo'", REFUSED),
        ("words that nobody has seen", REFUSED),
        ("", REFUSED),
        # The first controller accepted the job and the second did not answer, so the job may exist.
        ("sbatch: error: Socket timed out on send/recv operation\nsbatch: error: x (connect failure)", LOST),
    ],
)
def test_trouble(words, kind):
    found = failure("sbatch", 1, words)
    assert kind == (REFUSED if isinstance(found, SlurmRefused) else LOST if found.may_have_arrived else AWAY)


def test_cleaned():
    words = (
        "sbatch: error: invalid partition specified: nope\n"
        f"{SUBMIT}Invalid partition name specified\n"
        "\n"
        f"{SUBMIT}Invalid partition name specified\n"
        'Try "sbatch --help" for more information\n'
    )
    said(cleaned(words))
    said(cleaned("slurm_load_jobs error: Invalid job id specified\n"))
    said(cleaned("sbatch: fatal: Could not establish it"))
    said(cleaned("sbatch: Job 3 to start at noon"))
    said(cleaned("a site's own word: error: x"))


@pytest.mark.parametrize(
    ("words", "part_of_hint"),
    [
        ("Invalid partition name specified", "sinfo -s"),
        ("No partition specified or system default partition", "no default partition"),
        ("Invalid account or account/partition combination specified", "sacctmgr show associations"),
        ("Invalid qos specification", "--qos"),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", "limit"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "MaxTime"),
        ("Requested node configuration is not available", "sinfo -o"),
        ("Node count specification invalid", "--nodes"),
        ("Invalid generic resource (gres) specification", "%G"),
        ("Invalid feature specification", "%f"),
        ("Requested reservation is invalid", "scontrol show reservation"),
        ("Job dependency problem", "a dependency of the job"),
        ("Invalid job array specification", "MaxArraySize"),
        ("sbatch: unrecognized option '--foo'", "sbatch --help"),
        ("Pathname of a file, directory or other parameter too long", "--run-dir"),
        ("Invalid job id specified", "squeue --me"),
        ("Requested operation is presently disabled", "--no-requeue"),
        ("Unable to contact slurm controller (connect failure)", "scontrol ping"),
        ("Could not establish a configuration source", "SLURM_CONF"),
        ("Protocol authentication error", "munge"),
        ("Problem talking to the database: Connection refused", "accounting"),
        ("the site's plugin says no", None),
    ],
)
def test_hints(words, part_of_hint):
    hint = failure("sbatch", 1, words).hint
    assert hint == "" if part_of_hint is None else part_of_hint in hint


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


@pytest.mark.parametrize("text", ["N/A", "Unknown", "None", "", "0", "2024-01-01T00:00:00"])
def test_no_time(text):
    assert time_of(text) is None


def test_time_of():
    assert time_of("1700000000") == datetime(2023, 11, 14, 22, 13, 20, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:05", 5), ("05:00", 300), ("1:00:00", 3600), ("2-03:04:05", 183845), ("10-00:00:00", 864000)],
)
def test_seconds_of(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["UNLIMITED", "INVALID", "NOT_SET", "N/A", "NONE", "infinite", "", "5", "-1:00", "a-1:00:00"]
)
def test_no_duration(text):
    assert seconds_of(text) is None
