"""Tests that Git gives the same answers in the copy of the code, the working folder and the original."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.folders import commit, git, write
from tests.support.programs import run_program
from trainkit.job.work_folder import prepare_work_folder
from trainkit.launch.git_snapshot import without_credentials
from trainkit.launch.snapshot import copy_again, copy_code
from trainkit.plan.workload import Workload
from trainkit.run.git_copy import index_entries
from trainkit.run.record import CodeCopy, create_job, read_job
from trainkit.run.rundir import RunDir

QUESTIONS = """\
rev-parse HEAD
rev-parse --abbrev-ref HEAD
describe --tags --always --dirty
describe --all --long
status --porcelain=2 --branch --ignore-submodules=none
log --format=%H%an%s --max-count=20
diff
diff --cached
diff-index --name-status HEAD
diff-files --name-status
ls-files --stage
for-each-ref
remote get-url origin
remote get-url --push origin
config user.email
rev-parse @{upstream}
submodule status
cat-file -p HEAD^{tree}
""".splitlines()
ASK_ALL = 'for question in "$@"; do git -C "$0" $question; printf "%s\\0" $?; done'


def answers(folder: Path) -> dict[str, str]:
    """Return Git's output in a folder for each command, and then the exit code of the command."""
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = run_program("bash", "-c", ASK_ALL, folder, *QUESTIONS, env=environ)
    return dict(zip(QUESTIONS, done.stdout.split("\0")[:-1], strict=True))


def take(project: Path, run: RunDir, code: CodeCopy | None = None) -> CodeCopy:
    """Copy the code of a project, unless it is given, and prepare the working folder of a run."""
    code = code or copy_code(project, run, Workload(("x",)))
    create_job(run, backend="local", name="x", cwd=str(project), code=code)
    assert prepare_work_folder(run, read_job(run)) == run.work_dir
    return code


ORIGIN, CHANGED = "remote get-url origin", "diff-index --name-status HEAD"


def begin(root: Path, *args: str) -> None:
    git(root, "init", "-q", "-b", "main", *args)
    git(root, "config", "user.email", "me@here")
    write(root, "train.py", "pkg/m.py", "gone.py", "same.py", "a/b/c.py", "notes.txt")
    (root / ".gitignore").write_text("data/\n*.bin\n")
    commit(root)
    git(root, "tag", "-a", "v1", "-m", "first")
    git(root, "tag", "light")


def dirty(root: Path) -> None:
    begin(root)
    write(root, "data/x.bin", "w.bin", "staged.py", "pkg/new.py")
    git(root, "add", "staged.py")
    (root / "train.py").write_text("changed")
    (root / "gone.py").unlink()
    (root / "same.py").chmod(0o755)
    (root / "link.py").symlink_to("train.py")
    (root / "staged.py").write_text("and again")


def clean(root: Path) -> None:
    begin(root)
    write(root, "second.py")
    commit(root)


def no_commit(root: Path) -> None:
    git(root, "init", "-q")
    write(root, "train.py", "other.py")
    git(root, "add", "train.py")


def detached(root: Path) -> None:
    clean(root)
    git(root, "checkout", "-q", "HEAD~1")


def conflict(root: Path) -> None:
    begin(root)
    git(root, "checkout", "-qb", "other")
    (root / "train.py").write_text("theirs")
    commit(root)
    git(root, "checkout", "-q", "main")
    (root / "train.py").write_text("ours")
    commit(root)
    subprocess.run(["git", "-C", root, "merge", "-q", "other"], capture_output=True)


def sha256(root: Path) -> None:
    begin(root, "--object-format=sha256")
    (root / "train.py").write_text("changed")


def compact_index(root: Path) -> None:
    dirty(root)
    git(root, "update-index", "--index-version=4")
    git(root, "add", "--intent-to-add", "pkg/new.py")


def split_index(root: Path) -> None:
    clean(root)
    git(root, "update-index", "--split-index")
    write(root, "more.py")
    git(root, "add", "more.py")


def upstream(root: Path) -> Path:
    origin = root.parent / "origin"
    origin.mkdir()
    clean(origin)
    root.rmdir()
    return origin


def cloned(root: Path) -> None:
    origin = upstream(root)
    git(root.parent, "clone", "-q", str(origin), str(root))
    git(root, "remote", "set-url", "origin", "https://github.com/me/it.git")
    write(root, "local.py")
    commit(root)
    git(root, "gc", "-q")


def shallow(root: Path) -> None:
    git(root.parent, "clone", "-q", "--depth=1", f"file://{upstream(root)}", str(root))


def partial(root: Path) -> None:
    origin = upstream(root)
    git(origin, "config", "uploadpack.allowFilter", "true")
    git(root.parent, "clone", "-q", "--filter=blob:none", f"file://{origin}", str(root))


def borrowed(root: Path) -> None:
    """Create a repository that borrows objects from a second one, which borrows from a third one."""
    origin = upstream(root)
    git(root.parent, "clone", "-q", "--shared", str(origin), str(root.parent / "between"))
    git(root.parent, "clone", "-q", "--shared", str(root.parent / "between"), str(root))


def worktree(root: Path) -> None:
    git(upstream(root), "worktree", "add", "-q", "-b", "side", str(root))
    (root / "train.py").write_text("changed")


def separate(root: Path) -> None:
    begin(root, f"--separate-git-dir={root.parent / 'elsewhere.git'}")


def submodules(root: Path) -> None:
    library = root.parent / "library"
    library.mkdir()
    clean(library)
    begin(root)
    for name in ("third/lib", "empty", "changed"):
        git(root, "submodule", "add", "-q", str(library), name)
    commit(root)
    git(root, "submodule", "-q", "deinit", "-f", "empty")
    (root / "changed/train.py").write_text("changed")
    git(root / "third/lib", "checkout", "-q", "HEAD~1")


def sparse(root: Path) -> None:
    clean(root)
    git(root, "sparse-checkout", "set", "pkg")


def odd_names(root: Path) -> None:
    begin(root)
    write(root, "with space.py", "tab\tand\nline.py", "ü.py", 'quote".py', "x" * 200 + ".py")
    (root / os.fsdecode(b"byte\xff.py")).write_text("1")
    commit(root)
    git(root, "tag", "ü/tag")
    git(root, "checkout", "-qb", "näme/of")


SHAPES = [
    *(dirty, clean, no_commit, detached, conflict, sha256, compact_index, split_index, cloned, shallow),
    *(partial, borrowed, worktree, separate, submodules, sparse, odd_names),
]
CASES = [
    *((shape, False) for shape in SHAPES),
    *((shape, True) for shape in (sha256, worktree, submodules)),  # clones are packed anyway
]


@pytest.mark.parametrize(
    ("shape", "is_packed"), CASES, ids=[f"{case[0].__name__}{'-packed' * case[1]}" for case in CASES]
)
def test_git_answers_as_in_the_folder(project, run, shape, is_packed):
    shape(project)
    if is_packed:
        git(project, "repack", "-qad")
    git(project, "status")  # this command refreshes the index
    repositories = [path.parent.relative_to(project) for path in project.rglob(".git")]
    before = {inside: answers(project / inside) for inside in repositories}
    code = take(project, run)
    assert not [note for note in code.notes if "Git" in note]
    for place in (run.work_dir, run.code_dir):
        for inside, expected in before.items():
            assert answers(place / inside) == expected, (place.name, inside)


def test_a_later_commit_is_not_seen(project, run):
    """The copy of the copy, which a repeated run gets, does not see the commit either."""
    dirty(project)
    before = answers(project)
    code = copy_code(project, run, Workload(("x",)))
    commit(project)
    again = RunDir(run.path.parent / "again")
    again.path.mkdir()
    copied = copy_again(code, again)
    shutil.rmtree(run.code_dir)
    take(project, again, copied)
    assert answers(again.work_dir) == before


@pytest.mark.parametrize("shape", [dirty, cloned, submodules], ids=lambda shape: shape.__name__)
def test_what_holds_without_the_original(project, run, shape):
    """The original was deleted, its objects were pruned, or a node does not see its disk."""
    shape(project)
    git(project, "status")
    before = answers(project)
    code = copy_code(project, run, Workload(("x",)))
    for folder in run.path.parent.iterdir():
        if folder != run.path:
            shutil.rmtree(folder)
    take(project, run, code)
    assert answers(run.work_dir) == before


def test_what_a_run_does_in_its_copy_stays_there(project, run):
    clean(project)
    everything = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    take(project, run)
    write(run.work_dir, "mine.py")
    commit(run.work_dir)
    for line in (
        "checkout -qb mine",
        "tag t",
        "branch -D main",
        "gc -q --prune=now",
        "reset -q --hard HEAD~1",
    ):
        git(run.work_dir, *line.split())
    assert {path: path.read_bytes() for path in project.rglob("*") if path.is_file()} == everything
    assert answers(run.code_dir) == answers(project)


def test_new_code_brings_its_commit_and_keeps_those_of_the_run(project, run):
    clean(project)
    take(project, run)
    work = run.work_dir
    for number in (1, 2):
        if number == 2:
            write(work, "mine.py")
            commit(work)
        run.code_dir.rename(run.path / f"code.00{number}")
        (project / "train.py").write_text(f"new {number}")
        commit(project)
        run.job_file.unlink()
        take(project, run)
        assert (work / ".git.before-code.002").exists() is (number == 2)
        (work / "mine.py").unlink(missing_ok=True)
        assert answers(work) == answers(project)


def test_no_program_of_the_repository_runs(project, run):
    clean(project)
    ran, script = project.parent / "ran", project.parent / "script"
    script.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    script.chmod(0o755)
    (project / ".git/hooks").mkdir(exist_ok=True)
    for name in ("post-index-change", "post-checkout", "fsmonitor"):
        shutil.copy(script, project / ".git/hooks" / name)
    (project / ".gitattributes").write_text("*.py filter=x diff=x\n")
    commit(project)
    keys = "core.fsmonitor filter.x.clean filter.x.smudge diff.x.textconv diff.x.command core.sshCommand"
    for key in f"{keys} core.pager credential.helper remote.x.uploadpack alias.status".split():
        git(project, "config", key, f"'{script}'")
    git(project, "config", "include.path", str(project / "more"))
    (project / "more").write_text(f"[core]\n\thooksPath = {project / '.git/hooks'}\n[user]\n\tname = Me\n")
    os.utime(project / "train.py")
    ran.unlink(missing_ok=True)
    take(project, run)
    for command in ("status", "diff"):
        git(run.work_dir, command)
    assert not ran.exists()
    assert str(script) not in (run.work_dir / ".git/config").read_text()


def test_a_filter_of_the_repository_does_not_make_its_files_seem_changed(project, run):
    """Git stores other bytes than the file has, as with nbstripout. The copy lacks the filter's config."""
    git(project, "init", "-q")
    git(project, "config", "filter.strip.clean", "sed s/output//")
    (project / ".gitattributes").write_text("*.ipynb filter=strip\n")
    (project / "a.ipynb").write_text("cell output\n")
    os.utime(project / "a.ipynb", (1e9, 1e9))
    commit(project)
    assert answers(project)[CHANGED] == "0"
    take(project, run)
    assert answers(run.work_dir) == answers(project)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("https://me:secret@host/o/r.git", "https://host/o/r.git"),
        ("https://token@host:8443/o/r.git?access_token=x", "https://host:8443/o/r.git"),
        ("https://a@b:c@host/r", "https://host/r"),
        ("ssh://git:pw@host:22/r", "ssh://git@host:22/r"),
        ("git@host:o/r.git", "git@host:o/r.git"),
        ("me:pw@host:o/r.git", "host:o/r.git"),
        ("file:///srv/r", "file:///srv/r"),
        ("../other", "../other"),
        ("ext::sh -c 'x'", ""),
        ("https://host/ghp_0123456789abcdefghijklmnopqrstuvwxyz/r", "https://host/***/r"),
    ],
)
def test_a_remote_without_credentials(value, kept):
    assert without_credentials(value) == kept


def test_no_credential_reaches_the_run(project, run):
    clean(project)
    secret = "s3cr3t-0123456789"
    for key in ("remote.origin.url", "remote.origin.pushurl", "branch.main.remote", "submodule.x.url"):
        git(project, "config", key, f"https://me:{secret}@host/r")
    git(project, "config", f"url.https://{secret}@host/.insteadOf", "gh:")
    git(project, "config", "http.extraHeader", f"Authorization: {secret}")
    (project / ".git/FETCH_HEAD").write_text(secret)
    take(project, run)
    found = [path for path in run.path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert found == []
    assert answers(run.work_dir)[ORIGIN].startswith("https://host/r\n")


ASK = """
import git, os, subprocess, sys
here = git.Repo(".", search_parent_directories=True)
print(here.head.commit.hexsha, here.is_dirty(), here.active_branch, [tag.name for tag in here.tags])
print(subprocess.run(["git", "describe", "--tags", "--dirty"], capture_output=True, text=True).stdout)
"""


def test_a_run_inside_of_the_project_asks_git(project):
    """The repository around the run has a later commit at the resume. GIT_DIR is set, as in a hook."""
    dirty(project)
    (project / "ask.py").write_text(ASK)
    git(project, "add", "ask.py")
    asked = run_program(sys.executable, "ask.py", cwd=project).stdout
    assert asked.startswith(answers(project)["rev-parse HEAD"].split()[0])
    environ = {**os.environ, "GIT_DIR": str(project / ".git")}
    run = ["run", "--name", "g", "--", sys.executable, "ask.py"]
    for words in (run, ["resume", "g", "--set", "seed=2"]):
        done = run_program(sys.executable, "-m", "trainkit", *words, cwd=project, env=environ)
        assert done.stdout.split("\n", 2)[2] == asked, done.stderr
        commit(project)
    work = RunDir(project / "runs/g").work_dir
    assert answers(work)["rev-parse HEAD"] != answers(project)["rev-parse HEAD"]


def test_a_folder_that_git_ignores_has_no_repository(project, run):
    clean(project)
    write(project, "data/t.sh")
    assert "no repository" in str(take(project / "data", run).notes)
    assert answers(run.work_dir)["rev-parse HEAD"].endswith("128")


def test_a_chmod_in_the_second_of_the_last_change_is_a_change(project):
    begin(project)
    data, found = (project / ".git/index").read_bytes(), os.lstat(project / "same.py")
    (entry,) = (entry for entry in index_entries(data, 20) if entry.name == b"same.py")
    assert entry.is_unchanged(found, int(found.st_mtime) + 1)
    changed = os.stat_result([found.st_mode | 0o111, *found[1:]])
    assert not entry.is_unchanged(changed, int(found.st_mtime) + 1)
