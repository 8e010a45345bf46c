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


def test_words_arrive_in_bash_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = [*HOSTILE, *UNPRINTABLE]
    assert through_bash(words(values)) == values
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.binary(max_size=12).filter(lambda value: b"\0" not in value), min_size=1, max_size=40))
@settings(max_examples=30, deadline=None)
def test_any_file_name_arrives_in_bash_as_it_is(values: list[bytes]) -> None:
    names = [os.fsdecode(value) for value in values]
    assert through_bash(words(names)) == names


@pytest.mark.parametrize("value", [*HOSTILE, *UNPRINTABLE])
def test_a_word_is_one_printable_line(value: str) -> None:
    assert quote(value).isprintable()


def test_words_stay_readable() -> None:
    assert words(["python3", "-m", "a.b", Path("/x/y"), 3, "a b"]) == "python3 -m a.b /x/y 3 'a b'"
    assert quote("two\nlines, it's") == "$'two\\nlines, it\\'s'"


@pytest.mark.parametrize("write", [quote, directive])
def test_nul_is_refused(write: Any) -> None:
    with pytest.raises(UsageError, match=r"'a\\x00b' cannot be written in a script: it contains a NUL"):
        write("a\0b")


@pytest.mark.parametrize("value", [None, True, ["a"]])
def test_what_is_no_value_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="cannot be written in a script"):
        quote(value)


@pytest.mark.parametrize(
    ("value", "what"),
    [("a\nb", "a line break"), ("a\r", "a line break"), ("x\udcff", "bytes that are not UTF-8")],
)
def test_what_a_directive_cannot_hold(value: str, what: str) -> None:
    with pytest.raises(UsageError, match=f"cannot be written in an #SBATCH line: it contains {what}"):
        directive(value)


def test_directives_stay_readable() -> None:
    assert directive("gpu:h100:4") == "gpu:h100:4"
    assert directive(90) == "90"
    assert directive('my "best" run\\') == '"my \\"best\\" run\\\\"'


def test_comments_stay_on_their_line() -> None:
    assert comment("a\n#SBATCH --wrap=x\x1b\u202e ü") == "a\\n#SBATCH --wrap=x\\x1b\\u202e ü"


@pytest.mark.parametrize(
    ("path", "written"), [("/a/50%/j", "/a/50%%/j"), ("/a\\b/%j", "/a\\\\b/%j"), ("/plain", "/plain")]
)
def test_log_path(path: str, written: str) -> None:
    assert log_path(path) == written


def sbatch(cluster: Any, cwd: Path, *lines: str) -> str:
    script = "\n".join(["#!/bin/bash", *(f"#SBATCH --{line}" for line in lines), "echo it ran"])
    return str(
        cluster.run(["sbatch", "--parsable"], stdin=script, cwd=cwd, timeout_s=30, check=True).stdout
    ).strip()


def test_sbatch_reads_directives_as_they_were_meant(cluster: Any, tmp_path: Path) -> None:
    for value in filter(None, HOSTILE):
        job = sbatch(cluster, tmp_path, "hold", "output=/dev/null", f"comment={directive(value)}")
        shown = cluster.run(["squeue", "-h", "-j", job, "-o", "%k"], timeout_s=30, check=True).stdout
        assert shown == f"{value}\n"
    assert list(tmp_path.iterdir()) == []


def test_slurm_finds_every_log(cluster: Any, tmp_path: Path) -> None:
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
