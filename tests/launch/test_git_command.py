"""Tests that a repository from somebody else makes Git execute nothing at submit."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.folders import commit, git, write
from trainkit.errors import UsageError
from trainkit.launch.snapshot import git_state
from trainkit.launch.source_tree import run_git


@pytest.fixture
def received(tmp_path: Path) -> Path:
    """Return a repository with a file that Git has to read in order to compare it."""
    root = tmp_path / "received"
    write(root, "train.py")
    git(root, "init", "-q", "-b", "main")
    commit(root)
    (root / "train.py").write_text("print(1)\n")
    return root


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return a program that leaves a file when it runs."""
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\necho \"$0 $*\" >> '{tmp_path}/ran'\ncat\n")
    path.chmod(0o755)
    return path


def ran(program: Path) -> str:
    file = program.with_name("ran")
    return file.read_text() if file.exists() else ""


def has_seen_the_change(root: Path, *lines: str) -> bool:
    state = git_state(root) or {}
    return state["dirty"] is True and all(line in str(state["diff"]) for line in lines or ("+print(1)",))


PROGRAMS = (
    *("core.fsmonitor", "core.pager", "pager.diff", "pager.status", "core.sshCommand", "core.askPass"),
    *("credential.helper", "alias.diff", "alias.status", "diff.external", "diff.x.command"),
    *("diff.x.textconv", "core.editor", "core.alternateRefsCommand", "core.gitProxy", "gpg.program"),
)


@pytest.mark.parametrize("keys", [PROGRAMS, ["filter.x.clean"], ["filter.x.process", "filter.x.smudge"]])
def test_no_program_of_a_config_runs(received, program, keys):
    for key in keys:
        git(received, "config", key, str(program))
    git(received, "config", "filter.x.required", "true")
    (received / ".git/info/attributes").write_text("*.py filter=x diff=x\n")
    assert has_seen_the_change(received)
    assert ran(program) == ""


def test_no_filter_of_an_included_file_or_of_the_user_runs(received, program, monkeypatch):
    """A program of the user may read the config of the repository, as git-lfs does."""
    (received / ".gitattributes").write_text("*.py filter=theirs\n*.md filter=mine\n")
    (received / "a.md").write_text("a\n")
    commit(received)
    (received / "a.md").write_text("b\n")
    (received / "train.py").write_text("print(1)  # more\n")
    (received / ".git/more").write_text(f'[filter "theirs"]\n\tprocess = {program}\n')
    git(received, "config", "include.path", "more")
    home = program.parent / "gitconfig"
    home.write_text(f'[filter "mine"]\n\tclean = {program}\n\trequired\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(home))
    assert has_seen_the_change(received, "+print(1)  # more", "+b")
    assert ran(program) == ""


def test_a_filter_that_git_cannot_leave_out(received, program):
    git(received, "config", "filter.a=b.clean", str(program))
    (received / ".gitattributes").write_text("*.py filter=a=b\n")
    state = git_state(received) or {}
    assert (state["dirty"], state["diff"]) == (None, None), "unknown, not unchanged"
    with pytest.raises(UsageError, match="has the filter 'a=b', which git cannot disable"):
        run_git(str(received), "status")
    assert ran(program) == ""


def test_no_hook_and_no_program_of_a_submodule_runs(received, program, tmp_path):
    part = tmp_path / "part"
    subprocess.run(["cp", "-a", str(received), str(part)], check=True)
    git(received, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(part), "part")
    git(received, "commit", "-qam", "with a part")
    (received / "part/train.py").write_text("print(2)\n")
    (received / "train.py").write_text("print(1)  # again\n")
    inside = received / "part"
    git(inside, "config", "core.fsmonitor", str(program))
    git(inside, "config", "filter.x.clean", str(program))
    (inside / ".gitattributes").write_text("*.py filter=x\n")
    for root in (received / ".git", received / ".git/modules/part"):
        (root / "hooks").mkdir(exist_ok=True)
        (root / "hooks/post-index-change").symlink_to(program)
    git(received, "config", "submodule.part.ignore", "none")
    git(received, "config", "status.submoduleSummary", "true")
    git(received, "config", "diff.submodule", "diff")
    assert has_seen_the_change(received, "+print(1)  # again")
    assert ran(program) == ""


def test_a_partial_clone_fetches_nothing(received, program):
    oid = run_git(str(received), "rev-parse", "HEAD:train.py").stdout.decode().strip()
    (received / ".git/objects" / oid[:2] / oid[2:]).unlink()
    for key, value in {
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::{program} x",
        "remote.origin.uploadpack": str(program),
        "protocol.allow": "always",
        "protocol.ext.allow": "always",
    }.items():
        git(received, "config", key, value)
    assert (git_state(received) or {})["diff"] is None
    assert ran(program) == ""


@pytest.mark.parametrize(
    "name", ["GIT_EXTERNAL_DIFF", "GIT_PAGER", "GIT_SSH_COMMAND", "GIT_TRACE", "GIT_TRACE2", "GIT_DIR"]
)
def test_variables_of_git_change_nothing(received, program, monkeypatch, name):
    monkeypatch.setenv(name, str(program))
    written = program.read_bytes()
    assert has_seen_the_change(received)
    assert (ran(program), program.read_bytes()) == ("", written)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a repository to somebody else")
def test_the_repository_of_somebody_else_stays_unread_unless_it_is_a_safe_directory(
    received, program, monkeypatch
):
    git(received, "config", "core.fsmonitor", str(program))
    for path in (received, received / ".git"):
        os.chown(path, 65534, 65534)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    assert git_state(received) is None
    for name, value in {"COUNT": "1", "KEY_0": "safe.directory", "VALUE_0": str(received)}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    assert has_seen_the_change(received)
    assert ran(program) == ""
