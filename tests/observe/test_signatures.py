"""The signatures: the shipped ones, those of users, and what is wrong with them."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.observe.test_diagnose import failed, newest
from tests.support.broken_runs import HOST
from trainkit.cli.main import cli
from trainkit.errors import ConfigError
from trainkit.observe.signatures import load_signatures, placeholders, user_files
from trainkit.run.files import write_json

DOCS = Path(__file__).parents[2] / "docs/troubleshooting.md"


def own_signatures(folder: Path, text: str) -> tuple[Path, str]:
    path = folder / "signatures.yaml"
    path.write_text(text)
    return path, path.name


def problems_of(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_signatures([own_signatures(folder, text)])
    return error.value.message


def test_the_shipped_signatures_are_sound() -> None:
    signatures = load_signatures()
    assert all(signature.doc for signature in signatures)
    known = {"subject", "rank", "host", "message", "run", "attempt_dir", "command", "waiting"}
    for signature in signatures:
        groups = {name for pattern in signature.patterns for name in pattern.groupindex}
        assert set(placeholders(signature.causes[-1])) <= known | groups, signature.name
        assert not any(text.endswith(".") for text in (*signature.causes, *signature.advice)), signature.name


def test_no_line_of_a_log_takes_a_signature_long() -> None:
    """A line of 20,000 characters: a pattern that begins anew at each of them takes 200 million steps."""
    starts = ["a", " ", "(", '"', ".", "a.", "1", "0x", "rank 1 ", "Error: ", "node1: ", "a=b ", "Traceback "]
    slow = []
    for signature in load_signatures():
        for pattern in signature.patterns:
            own = re.sub(r"\\[a-zA-Z]|[\^$()?*+|\[\]{}]", "", pattern.pattern)[:20] or "a"
            began_s = time.process_time()
            for start in (*starts, own, f"{own}a", own[:6]):
                list(pattern.finditer((start * 20_000)[:20_000]))
            if time.process_time() - began_s > 1.0:
                slow.append(f"{signature.name}: {pattern.pattern}")
    assert not slow


def test_the_first_cause_and_the_advice_that_can_be_filled_in_are_shown(tmp_path: Path) -> None:
    text = 'a:\n  title: A\n  pattern: ["license error (?P<n>[0-9]+)", license]\n'
    text += '  cause: ["error {n}", "no license"]\n  advice: ["wait {n} s", "ask {nobody}"]\n'
    files = own_signatures(tmp_path, text)
    found = newest(failed(tmp_path / "1", b"", "license error 7", "E"), files)
    assert (found.name, found.cause, found.advice) == ("a", "error 7", ["wait 7 s"])
    assert newest(failed(tmp_path / "2", b"", "license gone", "E"), files).cause == "no license"


def test_the_example_of_the_docs_works(tmp_path: Path) -> None:
    docs = DOCS.read_text()
    blocks = re.findall(r"```text\n(.*?)```", docs, re.DOTALL)
    text = next(block for block in blocks if "pattern:" in block)
    files = own_signatures(tmp_path, text)
    run = failed(tmp_path / "run", b"", "FlexNet Licensing error:-5,357", "RuntimeError")
    found = newest(run, files)
    assert (found.name, found.cause) == ("no-license", f"rank 0 on {HOST} got no license: error -5,357")
    assert found.advice[1] == f"then `trainkit resume {run.path}` continues"


def test_the_placeholders_of_the_docs_exist() -> None:
    paragraph = DOCS.read_text().partition("Placeholders are the named groups")[2].partition("\n\n")[0]
    listed = set(re.findall(r"`\{(\w+)\}`", paragraph))
    shipped = {
        name
        for signature in load_signatures()
        for text in (*signature.causes, *signature.advice)
        for name in placeholders(text)
    }
    assert listed <= shipped | {"attempt", "step", "checkpoints_dir"}


def test_problems_of_signatures_have_their_lines(tmp_path: Path) -> None:
    text = "a:\n  title: A\n  pattern: '('\nb:\n  pattern: x\n  wher: log\nc:\n  title: C\n  pattern: 'y*'\n"
    message = problems_of(tmp_path, text)
    assert "signatures.yaml:3: a.pattern: '(' is not a regular expression" in message
    assert "signatures.yaml:6: b.wher: unknown key" in message
    assert "b.title: Field required" in message
    assert "signatures.yaml:9: c.pattern: 'y*' matches an empty line" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {title: A, pattern: x}\nb: {title: B, pattern: x}\na: {title: C, pattern: y}\n", "yaml:3: "),
        ("a:\n  title: A\n  pattern: x\n  cause: '{rank!r}'\n", "yaml:4: a.cause: '{rank!r}': {rank} is not"),
        ("a:\n  title: A\n  pattern: x\n  advice: ['{']\n", "yaml:4: a.advice: "),
        (
            "a:\n  title: A\n  pattern: x\n  role: reason\n",
            "yaml:4: a.role: is 'reason': Input should be 'cause'",
        ),
        ("a:\n  title: A\n  pattern: x\n  where: [logs]\n", "yaml:4: a.where: is 'logs'"),
        ("a:\n  title: A\n  pattern: [x, 3]\n", "yaml:3: a.pattern: is 3: Input should be a valid "),
        ("A b:\n  title: A\n  pattern: x\n", "yaml:1: A b: a name consists of a-z, 0-9 and -"),
        ("a: x\n", "yaml:1: a: is 'x': Input should be a valid dictionary"),
        ("- a\n", "signatures.yaml"),
        ("a: [\n", "signatures.yaml:"),
        ("a:\n\ttitle: A\n", "signatures.yaml:2"),
    ],
)
def test_what_is_wrong_with_a_signature(tmp_path: Path, text: str, message: str) -> None:
    assert message in problems_of(tmp_path, text)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "signatures.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"signatures\.yaml"):
        load_signatures([(path, path.name)])


def test_the_command_names_the_line_of_a_wrong_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = failed(tmp_path / "run", b"", "x", "RuntimeError")
    (run.path / "config.yaml").write_text("name: x\n")
    entry = {"attempt": 1, "job_id": "local-1", "host": "elsewhere", "submitted_at": "2026-01-01T00:00:00Z"}
    write_json(run.path / "job.json", {"name": "x", "attempts": [entry]})
    monkeypatch.chdir(tmp_path)
    own_signatures(tmp_path, "a:\n  title: A\n  pattern: '['\n")
    with pytest.raises(
        ConfigError, match=r"signatures\.yaml:3: a\.pattern: '\[' is not a regular expression"
    ):
        CliRunner().invoke(cli, ["diagnose", str(run.path)], standalone_mode=False, catch_exceptions=False)


def test_the_files_of_the_user_are_in_the_folder_and_at_home(tmp_path: Path) -> None:
    home = tmp_path / "config"
    (home / "trainkit").mkdir(parents=True)
    for folder in (home / "trainkit", tmp_path):
        (folder / "signatures.yaml").touch()
    names = [shown for _, shown in user_files(tmp_path, {"XDG_CONFIG_HOME": str(home)})]
    assert names == ["signatures.yaml", str(home / "trainkit" / "signatures.yaml")]
