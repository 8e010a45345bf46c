import json
import shlex
from unittest.mock import Mock
from urllib.parse import quote as url_quote

import pytest
import torch

from tests.support.folders import commit, git, write
from tests.support.runs import make_attempt
from tests.support.said import said
from trainkit.cli.main import main
from trainkit.errors import UsageError
from trainkit.formats import mask_secrets
from trainkit.launch import secrets
from trainkit.launch.secrets import mask_diff, refuse_leaks, refuse_secrets, secret_options, without_secrets
from trainkit.launch.snapshot import collect_provenance, git_state
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
    with pytest.raises(UsageError, match="HF_TOKEN"):
        refuse_leaks(
            "key: |\n  " + "\n  ".join(lines), "a.yaml", NAMES, {"HF_TOKEN": "\n".join(lines) + "\n"}
        )


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


SBATCH = ("--cluster", "example", "--backend", "sbatch", "--dry-run", "--set")


@pytest.mark.parametrize(
    "args",
    [
        ["--backend", "local", "--set", f"launch.env.WORDS={TOKEN}"],
        ["--backend", "local", "--", "python", "-c", "", f"--token={TOKEN}"],
        *([*SBATCH, f"resources.comment={TOKEN}"], [*SBATCH, f"launch.setup=['export T={TOKEN}']"]),
    ],
)
def test_submit_refuses_a_secret(tmp_path, monkeypatch, capsys, args):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main(["submit", "quickstart", "--set", "device=cpu", *args]) == 2
    shown = capsys.readouterr()
    assert "HF_TOKEN" in shown.err
    assert TOKEN not in shown.out + shown.err
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_submit_warns_of_an_option_that_looks_secret(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = ["submit", "quickstart", "--backend", "local", "--dry-run", "--", "true", "--api-key"]
    assert main([*args, "abcd1234efgh"]) == 0
    [warning] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    said(warning)
    assert main([*args, "$KEY_OF_MINE"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_only_the_owner_reads_the_plan(tmp_path):
    run = make_attempt(tmp_path / "run").run
    attempt = open_attempt(run, "a: 2\n", "{}")
    assert {file.stat().st_mode & 0o777 for file in (attempt.plan_file, run.plan_file)} == {0o600}


def test_each_word_of_a_long_command_line_is_read_with_what_stands_shortly_before(monkeypatch):
    """A shell may expand to thousands of files, and checking the whole line for each would take a minute."""
    mask = Mock(wraps=mask_secrets)
    monkeypatch.setattr(secrets, "mask_secrets", mask)
    files = [f"data/shard-{number:05d}" for number in range(200)]
    argv = ["python", "train.py", *files, "mysql", "-h", "db", "-pHunter2"]
    assert without_secrets(argv, ()) == [*argv[:-1], "-p***"]
    assert max(len(call.args[0]) for call in mask.call_args_list) < secrets.CONTEXT_CHARS + 50


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("--set launch.env.MINE=s3cret seed=1", "--set launch.env.MINE=*** seed=1"),
        ("--set=launch.env.HF_TOKEN=x=y", "--set=launch.env.HF_TOKEN=***"),
        ("--set a.password=p", "--set a.password=***"),
        ("data.tokenizer=bytes train.tokens_per_step=1", None),
        ("-- train.py --api-key abcd1234efgh --token=abcd", "-- train.py --api-key *** --token=***"),
        ("--password x --max-tokens 4096", "--password *** --max-tokens 4096"),
        ("sh -c 'cd x && train --api-key abcd1234efgh --lr 1'", "sh -c 'cd x && train --api-key *** --lr 1'"),
        ("--use-token --max-tokens=4096 hf_abcdefgh12345678", "--use-token --max-tokens=4096 ***"),
    ],
)
def test_secrets_of_a_command_line_are_masked_by_name_and_by_look(typed, written):
    assert without_secrets(shlex.split(typed), ["MINE"]) == shlex.split(written or typed)


def test_clean_and_changed_repository(tmp_path):
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-b", "trunk")
    write(tmp_path, "file")
    commit(tmp_path)
    state = git_state(tmp_path)
    assert (len(state["sha"]), state["branch"], state["dirty"], state["diff"]) == (40, "trunk", False, "")
    (tmp_path / "file").write_text("two\n")
    changed = git_state(tmp_path)
    assert changed["dirty"] is True
    assert "+two" in changed["diff"]


def test_whole_record(tmp_path):
    record = collect_provenance(tmp_path)
    assert record["torch"] == torch.__version__
    assert {"time", "trainkit", "python", "torch", "cwd", "host", "user", "git"} <= set(record)


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["train.py", "--api-key", "abcd1234efgh", "--lr", "1"], ["--api-key"]),
        (["x", "--wandb_token=abcd1234efgh", "--password", "long enough"], ["--wandb_token", "--password"]),
        (["sh", "-c", "train --api-key abcd1234efgh"], ["--api-key"]),
        (["train.py", "hf_abcdefgh12345678"], ["an argument"]),
        (["train.py", "--max-tokens", "100000000", "--token", "$HF_TOKEN", "--token", "--verbose-mode"], []),
        (["train.py", "--token", "short", "--key"], []),
    ],
)
def test_secrets_of_a_command(command, found):
    assert list(dict.fromkeys(secret_options(command))) == found


@pytest.mark.parametrize(
    ("line", "masked"),
    [
        ("+HF_TOKEN=abcdefghijkl", "+HF_TOKEN=***"),
        ("+export API_KEY='abcdefghijkl'", "+export API_KEY='***'"),
        ('+    api_key = "abcd1234efgh"', '+    api_key = "***"'),
        ('+  "password": "hunter2hunter2",', '+  "password": "***",'),
        ("+login('hf_abcdefgh12345678')", "+login('***')"),
        ("+AKIAABCDEFGHIJKLMNOP", "+***"),
        ("+ghp_abcdefghij0123456789", "+***"),
        ("+sk-proj-abcdefghij0123456789", "+***"),
        ("+HF_TOKEN=$TOKEN_OF_MINE", None),
        ("+names.sort(key=len_of_name)", None),
        ('+find(key="validation_loss")', None),
        ("+MAX_TOKENS=100000000", None),
        ("+tokens=tokens[:length]", None),
    ],
)
def test_secrets_in_a_diff(line, masked):
    text = f"diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -0,0 +1 @@\n{line}\n"
    assert mask_diff(text) == text.replace(line, line if masked is None else masked)


def test_a_private_key_in_a_diff():
    begin, inside = "-----BEGIN RSA PRIVATE KEY-----", "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC"
    masked = mask_diff(f"+{begin}\n+{inside}\n+{begin.replace('BEGIN', 'END')}\n")
    assert masked.startswith(f"+{begin}***")
    assert "MIIE" not in masked


@pytest.mark.parametrize("setting", ["color.ui=always", "diff.external=cat", "diff.noprefix=true", "a.b=c"])
def test_files_that_usually_contain_secrets_are_left_out_of_the_diff(tmp_path, setting):
    git(tmp_path, "init", "-b", "trunk")
    git(tmp_path, "config", *setting.split("="))
    write(tmp_path, ".env", "deep er/id_rsa", "file.py")
    commit(tmp_path)
    for name, text in ((".env", "MINE=swordfish\n"), ("deep er/id_rsa", "swordfish\n"), ("file.py", "two\n")):
        (tmp_path / name).write_text(text)
    state = git_state(tmp_path)
    assert "swordfish" not in state["diff"]
    assert state["diff"].count("(omitted: ") == 2
    assert "+two" in state["diff"]
    assert state["diff_masked"] is True
