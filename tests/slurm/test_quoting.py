"""Tests that bash and sbatch themselves read a quoted value back unchanged."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.errors import UsageError
from trainkit.quoting import comment, directive, log_path, quote, words

HOSTILE = (
    *("", "plain", "a b", "it's", 'say "hi"', "back\\slash", "end\\", "-n", "--", "~", "*", "a\tb"),
    *("$(touch PWNED)", "`touch PWNED`", "${HOME}", "a;b", "a|b&c", "a#b", "# c", " lead", "trail ", "!!"),
    *("ünïcødé 日本", "{a,b}", "<x>", "%j %x", "a=b", "'", '"', '\\\\"', "it's \\n", "\u202egpj.exe"),
)
UNPRINTABLE = ("two\nlines", "\n", "cr\r", "\x01\x7f", "\x1b[31m", "\u2028", "a\nb'c\\d", "\udcff\udc80x")


def through_bash(text: str) -> list[str]:
    """Return the arguments into which bash splits a text."""
    script = os.fsencode(f"printf '%s\\0' {text}\n")
    done = subprocess.run(["bash"], input=script, capture_output=True, check=True, timeout=30)
    return [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]


def test_words_arrive_in_bash_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = [*HOSTILE, *UNPRINTABLE]
    assert through_bash(words(values)) == values
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.binary(max_size=12).filter(lambda value: b"\0" not in value), min_size=1, max_size=40))
@settings(max_examples=30, deadline=None)
def test_any_file_name_arrives_in_bash_as_it_is(values):
    names = [os.fsdecode(value) for value in values]
    assert through_bash(words(names)) == names


def test_what_is_written_stays_readable():
    assert all(quote(value).isprintable() for value in (*HOSTILE, *UNPRINTABLE))
    assert words(["python3", "-m", "a.b", Path("/x/y"), 3, "a b"]) == "python3 -m a.b /x/y 3 'a b'"
    assert quote("two\nlines, it's") == "$'two\\nlines, it\\'s'"
    assert (directive("gpu:h100:4"), directive(90)) == ("gpu:h100:4", "90")
    assert directive('my "best" run\\') == '"my \\"best\\" run\\\\"'
    assert comment("a\n#SBATCH --wrap=x\x1b\u202e ü") == "a\\n#SBATCH --wrap=x\\x1b\\u202e ü"
    paths = {"/a/50%/j": "/a/50%%/j", "/a\\b/%j": "/a\\\\b/%j", "/plain": "/plain"}
    assert {path: log_path(path) for path in paths} == paths


NUL = r"^'a\\x00b' cannot be written in a script: it contains a NUL"
BREAK = "cannot be written in an #SBATCH line: it contains a line break"


@pytest.mark.parametrize(
    ("write", "value", "message"),
    [
        *(
            (quote, "a\0b", NUL),
            (directive, "a\0b", NUL),
            (directive, "a\nb", BREAK),
            (directive, "a\r", BREAK),
        ),
        *((quote, value, "cannot be written in a script") for value in (None, True, ["a"])),
        (directive, "x\udcff", "cannot be written in an #SBATCH line: it contains bytes that are not UTF-8"),
    ],
)
def test_what_cannot_be_written(write, value, message):
    with pytest.raises(UsageError, match=message):
        write(value)


def sbatch(cluster: Any, cwd: Path, *lines: str) -> str:
    script = "\n".join(["#!/bin/bash", *(f"#SBATCH --{line}" for line in lines), "echo it ran"])
    return str(
        cluster.run(["sbatch", "--parsable"], stdin=script, cwd=cwd, timeout_s=30, check=True).stdout
    ).strip()


def test_sbatch_reads_directives_as_they_were_meant(cluster, tmp_path):
    for value in filter(None, HOSTILE):
        job = sbatch(cluster, tmp_path, "hold", "output=/dev/null", f"comment={directive(value)}")
        shown = cluster.run(["squeue", "-h", "-j", job, "-o", "%k"], timeout_s=30, check=True).stdout
        assert shown == f"{value}\n"
    assert list(tmp_path.iterdir()) == []


def test_slurm_finds_every_log(cluster, tmp_path):
    names = [name for name in HOSTILE if name and len(name) < 40] + ["50%j\\x", "\\\\"]
    logs = [tmp_path / str(number) / name / "log" for number, name in enumerate(names)]
    for log in logs:
        log.parent.mkdir(parents=True)
    jobs = [sbatch(cluster, tmp_path, f"output={directive(log_path(str(log)))}") for log in logs]
    for job in jobs:
        cluster.wait_for_job(job, {"COMPLETED", "FAILED"}, 240)
    assert {str(log): log.exists() and log.read_text() for log in logs} == {
        str(log): "it ran\n" for log in logs
    }
