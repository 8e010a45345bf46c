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
from trainkit.launch.source_tree import looks_like_source, pattern_tree, repository_tree


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


IN_REPOSITORY = [".gitignore", "pkg/deep/module.py", "tracked.py", "untracked.py"]
PUBLIC_KEY = "deploy/id_ed25519.pub"


def test_secrets_are_left_out_unless_they_are_tracked(repository):
    write(repository, "certs/ca.pem", ".env.example")
    git(repository, "add", ".")
    write(repository, ".env", "deploy/id_ed25519", PUBLIC_KEY, "server.pem")
    tree = repository_tree(os.path.realpath(repository), "/nowhere")
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
    def test_what_looks_like_sources_and_belongs_to_no_run(self, tmp_path):
        sources = ["Makefile", "README.md", "conf/a.yaml", "pkg/_C.so", "run.sh", "train.py"]
        others = ["data.bin", "model.pt", ".hidden/x.py", "node_modules/x.json", "pkg/__pycache__/x.py"]
        others += ["venv/pyvenv.cfg", "venv/lib/x.py", "env/conda-meta/x.json", "runs/x.py", "wandb/x.yaml"]
        others += ["mine/b.py", "old/job.json", "old/config.yaml", "old/attempts/001/end.json"]
        write(tmp_path, *sources, *others)
        tree = pattern_tree(str(tmp_path), str(tmp_path / "mine"))
        assert (tree.root, tree.kind, tree.left_out) == (str(tmp_path), "pattern", [])
        assert sorted(tree.files) == sources

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
