import shlex

import pytest
import torch

from tests.support.folders import git
from trainkit.launch.secrets import mask_diff, secret_options, without_secrets
from trainkit.launch.snapshot import collect_provenance, git_state


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


def test_no_repository(tmp_path):
    assert git_state(tmp_path) is None


def test_clean_and_changed_repository(tmp_path):
    git(tmp_path, "init", "-b", "trunk")
    (tmp_path / "file").write_text("one\n")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
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
        (
            ["train.py", "--wandb_token=abcd1234efgh", "--password", "long enough"],
            ["--wandb_token", "--password"],
        ),
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
    for name in (".env", "deep er/id_rsa", "file.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    (tmp_path / ".env").write_text("MINE=swordfish\n")
    (tmp_path / "deep er/id_rsa").write_text("swordfish\n")
    (tmp_path / "file.py").write_text("two\n")
    state = git_state(tmp_path)
    assert "swordfish" not in state["diff"]
    assert state["diff"].count("(omitted: ") == 2
    assert "+two" in state["diff"]
    assert state["diff_masked"] is True
