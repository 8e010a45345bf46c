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
