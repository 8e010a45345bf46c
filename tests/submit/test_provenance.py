import subprocess

import torch

from trainkit.submit.create import collect_provenance, git_state, without_secrets


def git(folder, *args):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *args], check=True, capture_output=True, timeout=20)


def test_secrets_are_masked_by_name_and_by_look():
    argv = [
        "--set",
        "launch.env.MINE=s3cret",
        "--set=launch.env.HF_TOKEN=x=y",
        "--set",
        "a.password=p",
        "seed=1",
    ]
    assert without_secrets(argv, ["MINE"]) == [
        "--set",
        "launch.env.MINE=***",
        "--set=launch.env.HF_TOKEN=***",
        "--set",
        "a.password=***",
        "seed=1",
    ]


def test_tokens_that_are_no_secrets_stay():
    assert without_secrets(["data.tokenizer=bytes", "train.tokens_per_step=1"], []) == [
        "data.tokenizer=bytes",
        "train.tokens_per_step=1",
    ]


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
