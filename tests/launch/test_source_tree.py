"""Tests which files count as code, with a real git and without."""

import os
import socket
from pathlib import Path

import pytest

from tests.support.folders import commit, git, write
from tests.support.said import said
from trainkit.errors import UsageError
from trainkit.launch import source_tree
from trainkit.launch.secrets import looks_secret
from trainkit.launch.source_tree import SourceTree, looks_like_source, pattern_tree, repository_tree


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    write(folder, "tracked.py", "pkg/deep/module.py", "gone.py")
    (folder / ".gitignore").write_text("ignored/\n*.log\n")
    git(folder, "init", "-b", "trunk")
    commit(folder)
    (folder / "gone.py").unlink()
    write(folder, "untracked.py", "ignored/data.bin", "out.log")
    return folder


def make_run(folder: Path) -> Path:
    (folder / "attempts" / "001").mkdir(parents=True)
    write(folder, "job.json", "config.yaml", "checkpoints/step-1/shard.bin")
    return folder


def known(folder: Path, run: Path | None = None) -> SourceTree:
    tree = repository_tree(os.path.realpath(folder), os.path.realpath(run or "/nowhere"))
    assert tree is not None
    return tree


IN_REPOSITORY = [".gitignore", "pkg/deep/module.py", "tracked.py", "untracked.py"]
PUBLIC_KEY = "deploy/id_ed25519.pub"


def test_nothing_of_runs(repository):
    mine = make_run(repository / "pkg" / "odd [a]* run")
    make_run(repository / "runs" / "quickstart")
    make_run(repository / "experiments" / "old")
    write(repository, "runs/analyse.py", "experiments/notes.py", "pkg/runs/x.py")
    git(repository, "add", "runs/analyse.py")
    write(repository, "runs/junk.py")
    tree = known(repository, mine)
    expected = {*IN_REPOSITORY, "experiments/notes.py", "pkg/runs/x.py", "runs/analyse.py"}
    assert set(tree.files) == expected
    # Nor of a run that never started, or of the copy of its code.
    write(repository, "out/held/job.json", "out/held/plan.json", "out/held/code/tracked.py")
    copy = make_run(repository / "out" / "first") / "code"
    write(copy, "tracked.py")
    git(copy, "init")
    commit(copy)
    assert set(known(repository, mine).files) == expected


def test_secrets_are_left_out_unless_they_are_tracked(repository):
    write(repository, "certs/ca.pem", ".env.example")
    git(repository, "add", ".")
    write(repository, ".env", "deploy/id_ed25519", PUBLIC_KEY, "server.pem")
    tree = known(repository)
    names = {".env", "deploy/id_ed25519", "server.pem"}
    assert set(tree.left_out) == {(name, "looks like a secret") for name in names}
    assert set(tree.files) - set(IN_REPOSITORY) == {"certs/ca.pem", ".env.example", PUBLIC_KEY}


def test_no_repository_and_no_git(repository, tmp_path, monkeypatch):
    assert repository_tree(str(tmp_path), "/nowhere") is None
    (tmp_path / ".git").mkdir()
    assert repository_tree(str(tmp_path), "/nowhere") is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert repository_tree(str(repository), "/nowhere") is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a repository to somebody else")
def test_repository_of_somebody_else(repository, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    for path in (repository, repository / ".git"):
        os.chown(path, 65534, 65534)
    with pytest.raises(UsageError) as caught:
        repository_tree(str(repository), "/nowhere")
    said(caught.value.message)
    assert caught.value.hint.startswith(f"`git -C {repository} status` must work; ")


class TestPatterns:
    def test_what_looks_like_sources(self, tmp_path):
        sources = ["Makefile", "README.md", "conf/a.yaml", "pkg/_C.so", "run.sh", "train.py"]
        others = ["data.bin", "model.pt", ".hidden/x.py", "node_modules/x.json", "pkg/__pycache__/x.py"]
        others += ["venv/pyvenv.cfg", "venv/lib/x.py", "env/conda-meta/x.json", "runs/x.py", "wandb/x.yaml"]
        write(tmp_path, *sources, *others)
        tree = pattern_tree(str(tmp_path), "/nowhere")
        assert (tree.root, tree.kind, tree.left_out) == (str(tmp_path), "pattern", [])
        assert sorted(tree.files) == sources

    def test_nothing_of_runs(self, tmp_path):
        write(tmp_path, "a.py", "mine/b.py")
        make_run(tmp_path / "old")
        assert list(pattern_tree(str(tmp_path), str(tmp_path / "mine")).files) == ["a.py"]

    def test_secrets_large_files_links_and_what_is_no_file(self, tmp_path, monkeypatch):
        monkeypatch.setattr(source_tree, "MAX_FILE_BYTES", 1000)
        write(tmp_path, "a.py", ".env", "sub/key.pem", "small.json")
        (tmp_path / "large.json").write_bytes(b"x" * 1001)
        (tmp_path / "data").symlink_to("/data")
        os.mkfifo(tmp_path / "pipe.py")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "socket.py"))
            tree = pattern_tree(str(tmp_path), "/nowhere")
        assert sorted(tree.files) == ["a.py", "data", "small.json"]
        said("\n".join(f"{name}: {why}" for name, why in sorted(tree.left_out)))

    def test_no_project(self, tmp_path, monkeypatch):
        monkeypatch.setattr(source_tree, "MAX_SEARCHED", 10)
        write(tmp_path, *(f"{number}.bin" for number in range(10)))
        assert pattern_tree(str(tmp_path), "/nowhere").files == {}
        write(tmp_path, "more.bin")
        with pytest.raises(UsageError, match="has more than 10 files, too many for a project"):
            pattern_tree(str(tmp_path), "/nowhere")


SECRET = [".env", ".env.local", "prod.env", "id_rsa", "id_ed25519.old", ".netrc", "tls.key", "x.p12"]
HARMLESS = [".env.example", ".env.template", "id_rsa.pub", "environment.py", "keys.py", "env", "pem.py"]


def test_names_of_secrets_and_sources():
    assert [name for name in [*SECRET, *HARMLESS] if looks_secret(name)] == SECRET
    names = ["a.py", "Dockerfile.gpu", "a.pyc", "shard.bin"]
    assert [name for name in names if looks_like_source(name)] == names[:2]
