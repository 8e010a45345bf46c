import json
from urllib.parse import quote as url_quote

import pytest

from tests.support.runs import make_attempt
from tests.support.said import said
from trainkit.cli.main import main
from trainkit.errors import UsageError
from trainkit.formats import mask_secrets
from trainkit.launch import secrets
from trainkit.launch.secrets import refuse_leaks, refuse_secrets, without_secrets
from trainkit.quoting import quote
from trainkit.run.record import open_attempt

TOKEN = "hf_abcdefgh12345678"
NAMES = ("HF_TOKEN", "WANDB_API_KEY")


def test_leak_is_refused_without_showing_it():
    with pytest.raises(UsageError) as caught:
        refuse_leaks(f"curl -H 'Bearer {TOKEN}'", "submit.sbatch", NAMES, {"HF_TOKEN": TOKEN})
    said(caught.value.message)
    assert TOKEN not in caught.value.render()


@pytest.mark.parametrize(
    "value", [TOKEN, "it's a 'secret'", 'a"b\\c"d e', "pässwörd-日本", "tab\tand\x01more"]
)
@pytest.mark.parametrize(
    "write",
    [
        str,
        json.dumps,
        lambda value: json.dumps(f"x {value} y", ensure_ascii=False),
        quote,
        lambda value: quote(f"https://user:{value}@host/\n"),
        lambda value: f"https://user:{url_quote(value, safe='')}@host",
    ],
)
def test_however_it_is_spelled(value, write):
    with pytest.raises(UsageError, match="the value of HF_TOKEN would be written into plan"):
        refuse_leaks(f"before {write(value)} after", "plan", NAMES, {"HF_TOKEN": value})


def test_key_of_several_lines_that_were_indented():
    lines = ["-----BEGIN KEY-----", "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC", "-----END KEY-----"]
    text = "key: |\n" + "".join(f"  {line}\n" for line in lines)
    with pytest.raises(UsageError, match="HF_TOKEN"):
        refuse_leaks(text, "config.yaml", NAMES, {"HF_TOKEN": "\n".join(lines) + "\n"})


@pytest.mark.parametrize("value", ["1", "offline", "", "\n\n"])
def test_short_values_occur_anywhere_and_other_variables_are_no_secrets(value):
    text = f"step 1\n\noffline: true; home is {TOKEN}"
    refuse_leaks(text, "submit.sbatch", NAMES, {"HF_TOKEN": value, "HOME": TOKEN})


def test_a_secret_that_a_command_sets_is_refused_without_showing_it():
    with pytest.raises(UsageError) as error:
        refuse_secrets(["env", "WANDB_API_KEY=0123456789abcdef", "python", "train.py"], ())
    assert "WANDB_API_KEY" in error.value.message
    assert "0123456789" not in error.value.render()
    refuse_secrets(["python", "train.py", "--max_tokens=40960000", "model.vocab_key=abcdefghij"], ())


def test_submit_warns_of_an_option_that_looks_secret(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = ["submit", "quickstart", "--backend", "local", "--dry-run", "--", "true"]
    args += ["--api-key", "abcd1234efgh"]
    assert main(args) == 0
    [warning] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    said(warning)
    assert "abcd1234efgh" not in warning
    assert main([*args[:-1], "$KEY_OF_MINE"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_only_the_owner_reads_the_plan(tmp_path):
    run = make_attempt(tmp_path / "run").run
    attempt = open_attempt(run, "a: 2\n", "{}")
    assert {file.stat().st_mode & 0o777 for file in (attempt.plan_file, run.plan_file)} == {0o600}


def test_each_word_of_a_long_command_line_is_read_with_what_stands_shortly_before(monkeypatch):
    """A shell may expand to thousands of files, and checking the whole line for each would take a minute."""
    lengths = []

    def mask(text: str) -> str:
        lengths.append(len(text))
        return mask_secrets(text)

    monkeypatch.setattr(secrets, "mask_secrets", mask)
    files = [f"data/shard-{number:05d}" for number in range(200)]
    argv = ["python", "train.py", *files, "mysql", "-h", "db", "-pHunter2"]
    assert without_secrets(argv, ()) == [*argv[:-1], "-p***"]
    assert max(lengths) < secrets.CONTEXT_CHARS + 50
