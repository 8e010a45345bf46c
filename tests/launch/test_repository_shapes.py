"""Tests snapshots of repositories of common shapes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.folders import commit, git, write
from trainkit.errors import UsageError
from trainkit.launch import source_tree
from trainkit.launch.snapshot import copy_code
from trainkit.plan.workload import TRAINER, Workload
from trainkit.run.rundir import RunDir


def ignore(root: Path, *patterns: str) -> None:
    (root / ".gitignore").write_text("".join(f"{pattern}\n" for pattern in patterns))


def submodule(root: Path) -> None:
    library = root.parent / "library"
    library.mkdir()
    git(library, "init")
    ignore(library, "*.bin")
    write(library, "lib.py")
    commit(library)
    git(root, "init")
    write(root, "train.py")
    for name in ("third/lib", "empty"):
        git(root, "submodule", "add", str(library), name)
    git(root, "submodule", "deinit", "-f", "empty")
    commit(root)
    write(root, "third/lib/w.bin")


def nested_clone(root: Path) -> None:
    git(root, "init")
    write(root, "train.py", "lib/m.py", "lib/w.bin")
    git(root / "lib", "init")
    ignore(root / "lib", "*.bin")


def worktree(root: Path) -> None:
    origin = root.parent / "origin"
    origin.mkdir()
    git(origin, "init")
    ignore(origin, "data")
    write(origin, "train.py")
    commit(origin)
    git(origin, "worktree", "add", "-b", "other", str(root / "tree"))
    write(root / "tree", "data/a.bin")


def sparse(root: Path) -> None:
    git(root, "init")
    write(root, "train.py", "big/a.py", "small/b.py")
    commit(root)
    git(root, "sparse-checkout", "set", "small")


def symlinks(root: Path) -> None:
    write(root.parent, "elsewhere/a.bin")
    git(root, "init")
    ignore(root, "data")
    write(root, "train.py")
    (root / "data").symlink_to(root.parent / "elsewhere")
    (root / "alias.py").symlink_to("train.py")
    (root / "dangling").symlink_to("nothing")
    (root / "circle").symlink_to("circle")


def no_repository(root: Path) -> None:
    write(root, "train.py", "data/a.bin", "out/a.pt", "pkg/m.py", "pkg/w.pt", "wandb/x.json", "id_rsa")


def no_commits_and_an_empty_folder(root: Path) -> None:
    git(root, "init")
    ignore(root, "data")
    (root / "data").mkdir()
    write(root, "train.py")


def folders_of_a_key_of_runs_and_of_nothing(root: Path) -> None:
    git(root, "init")
    write(root, "train.py", "runs/analyse.py")
    commit(root)
    write(root, "keys/id_rsa", "my/deep/r1/job.json", "my/deep/r1/attempts/001/end.json", "runs/junk.py")
    # A run that never started, and the copy of the code of another run.
    write(root, "out/held/job.json", "out/held/plan.json", "out/held/code/train.py", "pkg/runs/x.py")
    write(root, "out/first/job.json", "out/first/attempts/001/end.json", "out/first/code/train.py")
    git(root / "out/first/code", "init")
    commit(root / "out/first/code")
    (root / "exp").mkdir()


# Maps a name to the patterns that git ignores, the files, the copied ones among them, and the links.
TABLE = {
    "ignored weights next to text": ("*.pt", "out/a.pt out/note.txt", "out/note.txt", ""),
    "only ignored weights": ("*.pt", "out/a.pt out/deep/b.pt", "", ""),
    "ignored data by name": ("*.bin", "data/a.bin data/deep/b.bin", "", "data"),
    "ignored data in a folder of code": (
        *("*.bin", "data/prepare.py data/a.bin data/deep/b.bin data/deep/c.bin"),
        *("data/prepare.py", "data/a.bin data/deep"),
    ),
    "ignored folder": ("/data/", "data/a.bin data/deep/b.json", "", "data"),
    "ignored folder in one of code": ("cache", "pkg/m.py pkg/cache/x.bin", "pkg/m.py", "pkg/cache"),
    "names that sort between": ("*.bin", "a/x.bin a-b/y.bin a.b/z.bin", "", "a a-b a.b"),
    "built extension": (
        *("*.so build/", "pkg/__init__.py pkg/_C.so build/lib/pkg/_C.so"),
        *("pkg/__init__.py", "build pkg/_C.so"),
    ),
    "earlier runs": ("*.bin runs/", "runs/x/job.json runs/x/attempts/001/end.json runs/x/work/a.bin", "", ""),
    "elsewhere": ("*.bin", "exp/x/job.json exp/x/attempts/001/a.bin exp/x/work/deep/a.bin", "", ""),
    "ignored folder of them": ("exp/", "exp/x/job.json exp/x/attempts/001/end.json", "", ""),
    "earlier group": ("*.bin", "g/sweep.json g/logs/0.log g/code/a.bin g/0/work/b.bin", "", ""),
    "all of it": (
        "data/ *.bin .env __pycache__/ runs/ old/ .venv",
        "data/deep/x .venv/bin/python sub/m.py sub/w.bin .env key.pem old/job.json old/attempts/1/x"
        " sub/__pycache__/m.pyc runs/x/a",
        "sub/m.py",
        ".venv data sub/w.bin",
    ),
    "odd names": ("*.bin", "a/t'r$(x).py a/é.bin -x.bin [1].bin", "a/t'r$(x).py", "-x.bin [1].bin a/é.bin"),
    "code named like outputs": (
        *("", "logs/__init__.py results/plot.py results/curve.npy last.ckpt"),
        *("logs/__init__.py results/plot.py", ""),
    ),
}


COMMITTED = ("ignored data in a folder of code", "ignored folder in one of code", "built extension")


@pytest.mark.parametrize("name", TABLE)
def test_what_is_ignored(project, run, name):
    patterns, files, copied, linked = map(str.split, TABLE[name])
    git(project, "init")
    ignore(project, *patterns)
    write(project, "train.py", *files)
    if name in COMMITTED:
        commit(project)
    folder = "pkg" if name == "ignored folder in one of code" else ""
    check(project / folder, run, copied, linked)


SHAPES: dict[Callable[[Path], None], tuple[str, list[str], list[str]]] = {
    # Maps a shape to the folder to submit from, the files copied besides train.py and .gitignore, and the
    # links.
    submodule: ("", [".gitmodules", "third/lib/.gitignore", "third/lib/lib.py"], ["third/lib/w.bin"]),
    nested_clone: ("", ["lib/.gitignore", "lib/m.py"], ["lib/w.bin"]),
    worktree: ("tree", [], ["data"]),
    sparse: ("", ["small/b.py"], []),
    symlinks: ("", ["alias.py", "circle", "dangling"], ["data"]),
    no_repository: ("", ["pkg/m.py"], ["data"]),
    no_commits_and_an_empty_folder: ("", [], ["data"]),
    folders_of_a_key_of_runs_and_of_nothing: ("", ["pkg/runs/x.py", "runs/analyse.py"], []),
}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_what_is_copied_and_linked(project, run, shape):
    shape(project)
    folder, copied, linked = SHAPES[shape]
    check(project / folder, run, copied, linked)


def check(folder: Path, run: RunDir, copied: list[str], linked: list[str]) -> None:
    """Check that the copy of the code in a folder has these files and links."""
    found = copy_code(folder, run, Workload(("true",)))
    assert found.links == linked
    files = [
        os.path.relpath(Path(parent, name), run.code_dir)
        for parent, folders, names in os.walk(run.code_dir)
        if ".git" not in Path(parent).parts
        for name in (*names, *(name for name in folders if Path(parent, name).is_symlink()))
    ]
    assert sorted({*files} - {"train.py", ".gitignore", *linked}) == copied
    for name in linked:
        assert (run.code_dir / name).readlink() == Path(found.source, name)


def test_data_between_the_code(project, run, monkeypatch):
    monkeypatch.setattr(source_tree, "MAX_LINKS", 2)
    monkeypatch.setattr(source_tree, "MAX_WRITTEN", 2)
    write(project, *(f"{number}.jpg" for number in range(3)))
    with pytest.raises(UsageError, match=r"has 3 files besides its code"):
        copy_code(project, run, Workload(("true",)))
    assert copy_code(project, run, TRAINER).num_files == 0


def test_small_files_that_a_script_may_write_again_are_copied(project, run):
    """Each run of a sweep would overwrite the picture of the first trial through a link."""
    (project / "out.png").write_bytes(b"first")
    (project / "Metrics.CSV").write_text("step,loss\n")
    (project / "data.csv").write_bytes(bytes(source_tree.MAX_WRITTEN_BYTES + 1))
    # The folder of images has code, so its files are considered.
    images = [f"images/{number}.png" for number in range(source_tree.MAX_WRITTEN + 1)]
    write(project, "train.bin", "images/README.md", *images)
    found = copy_code(project, run, Workload(("true",)))
    assert found.num_bytes == len("first" + "step,loss\n" + "images/README.md")
    linked = [path.name for path in run.code_dir.iterdir() if path.is_symlink()]
    assert sorted(linked) == ["data.csv", "train.bin"]
    assert all((run.code_dir / name).is_symlink() for name in images)
    assert (run.code_dir / "out.png").read_bytes() == b"first"
