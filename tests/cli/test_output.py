"""Tests the output in locales that lack characters: replaced in text, escaped in JSON."""

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.mutated_runs import make_project
from trainkit.cli.main import main

ODD = "█ ✓ é 中 \udcff \ud800"
ENCODINGS = ("ascii", "cp1252", "utf-8")
COMMANDS = (
    """
status|status {run}|logs {run}|logs {run} --all --lines 3|logs {run} -f|diagnose {run}
report {run} --out report-█.html|watch {run} --once|ckpt ls {run}|compare {run} {run}
compare {run} {run} --csv|check --set name=é|plan|logs nothing-█|status runs/█-\udcff
submit --backend local --name é█ --dry-run|resume {run} --dry-run|env|data validate █
""".strip()
    .replace("\n", "|")
    .split("|")
)
AS_JSON = (
    """
status --json|status {run} --json|diagnose {run} --json|report {run} --json --out r█.html|schema
watch {run} --once --json|ckpt ls {run} --json|compare {run} {run} --json|status nothing-█ --json
check --json|plan --json|submit --backend local --name é --dry-run --json
""".strip()
    .replace("\n", "|")
    .split("|")
)
RUN = "runs/né█"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a folder with a failed run, whose files have characters that most encodings lack."""
    folder = tmp_path / "project"
    make_project(folder, ["crashed"])
    (folder / "runs/crashed").rename(folder / RUN)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(folder / "bin"))
    for log in Path(RUN).rglob("*.log"):
        log.write_bytes(log.read_bytes() + f"{ODD}\n".encode(errors="surrogatepass"))
    for file in Path(RUN).rglob("*.json*"):
        text = re.sub(r'("(?:reason|message|name)": )"', rf'\1"{ODD} ', file.read_text())
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
    return folder


def printed(line: str, encoding: str, errors: str = "strict") -> tuple[int, bytes, bytes]:
    """Return the exit code, stdout and stderr of a command with a given encoding."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(line.format(run=RUN)))
    out.flush()
    err.flush()
    return code, out.buffer.getvalue(), err.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_command_in_every_locale(project, encoding):
    for line in COMMANDS:
        code, out, err = printed(line, encoding)
        said = out.decode(encoding) + err.decode(encoding)
        assert code in (0, 1, 2), (line, said)
        assert re.search("unexpected|Unicode", said) is None, (line, said)
        assert said.strip(), line
        for file in (*project.glob("r*.html"), *project.glob(f"{RUN}/report.html")):
            file.unlink()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_json_is_json_in_every_locale(project, encoding):
    has_no_times = [line for line in AS_JSON if line.startswith(("compare", "schema", "plan", "ckpt"))]
    expected = {line: json.loads(printed(line, "utf-8")[1]) for line in has_no_times}
    for line in AS_JSON:
        for file in project.glob("r*.html"):
            file.unlink()
        code, out, _ = printed(line, encoding)
        value = json.loads(out.decode(encoding))
        assert encoding == "utf-8" or out.isascii()
        assert (code in (0, 1, 2), "Unicode" in str(value)) == (True, False), (line, value)
        assert value == expected.get(line, value)


def test_a_log_in_latin_1(project):
    assert printed("logs {run} --lines 1", "latin-1")[1] == "? ? é ? ??? ???\n".encode("latin-1")
    assert printed("logs {run} --lines 1", "utf-8")[1].decode().startswith("█ ✓ é 中 ")
    name = printed("status {run}", "ascii", "surrogateescape")[1].decode("ascii")
    assert f"{project}/runs/n??" in name


def test_the_bytes_of_a_name_are_printed_where_that_is_possible(project):
    assert b"runs/\xff" in printed("status runs/\udcff", "utf-8", "surrogateescape")[2]
