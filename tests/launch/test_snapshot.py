"""Tests the copy of the code: its content, where Python looks for modules in it, and when it is replaced."""

import errno
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.disks import small_disk
from tests.support.folders import content, git, names, write
from tests.support.programs import run_program
from tests.support.runs import launch_plan
from tests.support.said import said
from trainkit.config import load_config
from trainkit.errors import UsageError
from trainkit.launch import snapshot as module
from trainkit.launch.repeat import submission_folder
from trainkit.launch.snapshot import copy_code, find_import_path, plan_copy, renewed_code
from trainkit.launch.source_tree import SourceTree
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.workload import TRAINER, Workload
from trainkit.run.files import to_json, write_json
from trainkit.run.record import CodeCopy, copied_file, create_job, read_job
from trainkit.run.rundir import RunDir


def take(project: Path, run: RunDir) -> CodeCopy:
    return copy_code(project, run, TRAINER)


def test_copy_of_a_repository(project, run, tmp_path):
    write(project, "pkg/a.py", "b.txt", "c.bin")
    (project / ".gitignore").write_text("*.bin")
    git(project, "init")
    (tmp_path / "link").symlink_to(project)
    found = take(tmp_path / "link" / "pkg", run)
    assert content(run.code_dir) == {"pkg/a.py": "pkg/a.py", "b.txt": "b.txt", ".gitignore": "*.bin"}
    assert (found.source, found.code, found.subfolder) == (str(project), str(run.code_dir), "pkg")
    assert (found.kind, found.num_files, found.num_bytes) == ("git", 3, 18)
    assert found.workdir == str(run.code_dir / "pkg")
    assert found.left_out == found.notes == []
    assert names(run.path) == ["code"]


@pytest.mark.parametrize("absolute", [False, True])
def test_a_file_is_found_in_the_copy_when_the_project_is_gone(project, run, monkeypatch, absolute):
    write(project, "pkg/mine.py", "above.py")
    git(project, "init")
    found = take(project / "pkg", run)
    create_job(run, backend="sbatch", name="x", cwd=str(project / "pkg"), code=found)
    shutil.rmtree(project)
    monkeypatch.chdir(run.path)
    start = f"{project / 'pkg'}/" if absolute else ""
    assert copied_file(run, f"{start}mine.py") == run.code_dir / "pkg/mine.py"
    assert copied_file(run, f"{start}../above.py") == run.code_dir / "above.py"


def test_modes(project, run):
    modes = {"run.sh": 0o755, "plain.py": 0o644, "read_only.py": 0o444, "odd.py": 0o4711}
    for name, mode in modes.items():
        (project / name).touch()
        (project / name).chmod(mode)
    take(project, run)
    copied = {name: (run.code_dir / name).stat().st_mode & 0o7777 for name in modes}
    assert copied == {"run.sh": 0o555, "plain.py": 0o444, "read_only.py": 0o444, "odd.py": 0o511}
    assert run.code_dir.stat().st_mode & 0o777 == 0o700


def test_symlinks(project, run, tmp_path):
    write(tmp_path, "outside/x")
    write(project, "conf/deep/a.yaml", "large.bin")
    links = {"relative.yaml": "conf/deep/a.yaml", "absolute.yaml": f"{project}/conf/deep/a.yaml"}
    links |= {"conf/up": "../conf/deep", "conf/absolute": f"{project}/conf"}
    links |= {"root": ".", "absolute_root": str(project), "not_copied": "large.bin", "dangling": "nowhere"}
    links |= {"out": "../outside/x", "absolute_out": f"{tmp_path}/outside"}
    for name, target in links.items():
        (project / name).symlink_to(target)
    take(project, run)
    found = {name: str((run.code_dir / name).readlink()) for name in links}
    changed = {"absolute.yaml": "conf/deep/a.yaml", "conf/absolute": ".", "absolute_root": "."}
    changed |= {"out": f"{tmp_path}/outside/x"}
    changed |= {"not_copied": f"{project}/large.bin", "dangling": f"{project}/nowhere"}
    assert found == links | changed
    assert (run.code_dir / "out").read_text() == "outside/x"
    assert (run.code_dir / "absolute.yaml").resolve() == run.code_dir / "conf" / "deep" / "a.yaml"


def test_working_directory_that_the_repository_ignores(project, run):
    git(project, "init")
    (project / ".gitignore").write_text("scratch/\nempty/\n")
    write(project, "scratch/a.py")
    (project / "empty").mkdir()
    found = take(project / "scratch", run)
    assert (found.kind, found.source) == ("pattern", str(project / "scratch"))
    assert list(content(run.code_dir)) == ["a.py"]
    shutil.rmtree(run.code_dir)
    found = take(project / "empty", run)
    assert (found.kind, found.num_files, found.workdir) == ("git", 1, str(run.code_dir / "empty"))
    assert (run.code_dir / "empty").is_dir()


def test_what_was_left_out_is_said(project, run):
    write(project, "a.pem", "b.pem", "c.pem", "d.pem", "e.pem", ".env", "w.bin")
    said("\n".join(copy_code(project, run, Workload(("true",))).notes))


def test_too_large(project, run, monkeypatch):
    for number in range(7):
        (project / f"{number}.json").write_bytes(b"x" * (100_000 * number))
    with monkeypatch.context() as patch:
        patch.setattr(module, "MAX_FILES", 6)
        with pytest.raises(UsageError, match="has 7 files"):
            take(project, run)
    monkeypatch.setattr(module, "MAX_BYTES", 2_000_000)
    with pytest.raises(UsageError) as caught:
        take(project, run)
    said(caught.value.render())
    assert names(run.path) == []
    monkeypatch.setattr(module, "MAX_BYTES", 2_100_000)
    assert take(project, run).num_bytes == 2_100_000


def test_full_disk_leaves_nothing(project, tmp_path):
    for number in range(20):
        (project / f"{number}.py").write_bytes(b"x" * 100_000)
    with small_disk(tmp_path / "disk", "1m") as disk:
        with pytest.raises(UsageError) as caught:
            take(project, RunDir(disk))
        said(caught.value.message)
        assert names(disk) == []


def test_plan_is_what_is_taken(project, run):
    write(project, "a.py", ".env")
    git(project, "init")
    planned, _ = plan_copy(project, run, TRAINER)
    assert names(run.path) == []
    assert take(project, run) == planned
    with pytest.raises(UsageError, match="code already exists"):
        take(project, run)
    inside = RunDir(project / "odd [a]* run")
    inside.path.mkdir()
    inside.config_file.touch()
    git(project, "add", ".")
    assert take(project, inside).num_files == 2  # a file that is tracked now is no secret


@pytest.mark.skipif(os.getuid() != 0, reason="root can act as another user")
def test_file_that_cannot_be_read():
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), "project/a.py", "project/closed.py")
        run = RunDir(Path(name, "run"))
        run.path.mkdir()
        for path in (".", "project", "run"):
            Path(name, path).chmod(0o777)
        Path(name, "project/closed.py").chmod(0o600)
        os.seteuid(65534)
        try:
            with pytest.raises(UsageError) as caught:
                take(Path(name, "project"), run)
        finally:
            os.seteuid(0)
        said(f"{caught.value.render()}\n{names(run.path)}".replace(name, "FOLDER"))


def test_a_thousand_files_take_less_than_a_second(project, run):
    write(project, *(f"p{number % 50}/m{number}.py" for number in range(1000)))
    git(project, "init")
    git(project, "add", ".")
    began = time.process_time()
    assert take(project, run).num_files == 1000
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("command", "noted"),
    [
        ("sh -c 'cat ../data/x.txt'", ["../data/x.txt in the command"]),
        ("python t.py --data=../data/x.txt,../data/y.txt", ["../data/x.txt in the command"]),
        ("python t.py --resume last.ckpt", ["last.ckpt in the command"]),
        ("python t.py --resume out/last.ckpt --to out", ["out/last.ckpt in the command"]),
        ("python reads.py", ["../data/x.txt in reads.py", "../data/{name} in reads.py"]),
        ("python t.py --data big.bin --in linked/a.bin --out results/new --name data", []),
        ("python t.py --data ../nothing", []),
    ],
)
def test_paths_that_the_copy_lacks_are_noted(project, run, command, noted):
    files = ("t.py", "big.bin", "linked/a.bin", "last.ckpt", "out/last.ckpt")
    write(project, "data/x.txt", *(f"code/{name}" for name in files))
    above = ["open('../data/x.txt')", 'f"../data/{name}"', "'../nothing'", "'../'", "'./t.py'"]
    (project / "code/reads.py").write_text("\n".join(above))
    found = copy_code(project / "code", run, Workload(tuple(shlex.split(command)))).notes
    notes = [note.partition(" is not in the copy") for note in found if " absolute path, " in note]
    about = [place for place, *_ in notes if "in the" in place or "in reads" in place]
    assert about == noted
    assert not noted or f" absolute path, {project}/" in next(note for note in found if noted[0] in note)


def test_an_argument_outside_of_the_copy_is_refused(project, run):
    write(project, "code/t.py", "data/x.txt")
    for word in ("../data", "--data=../data", "t.py/../../data"):
        with pytest.raises(UsageError, match="in the command is outside of") as caught:
            copy_code(project / "code", run, Workload(("python", "t.py", word)))
        said(caught.value.hint)


def tree(*files: str, subfolder: str = "") -> SourceTree:
    return SourceTree("/source", "git", subfolder, dict.fromkeys(files, Path("/").stat()))


def found_in(*files: str, subfolder: str = "", inherited: str = "") -> list[str]:
    found, notes = find_import_path(tree(*files, subfolder=subfolder), "/code", inherited)
    assert notes == []
    return list(found)


def test_where_python_looks():
    assert found_in() == ["/code"]
    assert found_in("sub/a.py", subfolder="sub") == ["/code/sub"]
    assert found_in("a.py", subfolder="empty") == ["/code/empty"]
    around = ("tools/exp/a.py", "tools/setup.py", "src/pkg/__init__.py", "pyproject.toml")
    assert found_in(*around, subfolder="tools/exp") == ["/code/tools/exp", "/code/tools", "/code/src"]
    inherited = "/source/lib:/elsewhere:relative::/source/gone:/sourcery"
    assert found_in("lib/a.py", inherited=inherited) == ["/code", "/code/lib"]
    assert found_in("logging/x.txt", "sub/io.py", "queue.yaml", "types/deep/__init__.py") == ["/code"]
    for name, code in (("queue.py", "/code"), ("types/__init__.py", "/code"), ("a.py", "/code:1")):
        found, [note] = find_import_path(tree(name, "logging/x.txt", "sub/io.py"), code, "")
        assert found == []
        said(note)


def test_modules_come_from_the_copy(project, run):
    """The same is true in a job, because an installation that leads to the source comes after PYTHONPATH."""
    (project / "pyproject.toml").touch()
    (project / "mine.py").write_text("VALUE = 'as submitted'")
    found = take(project, run)
    (project / "mine.py").write_text("VALUE = 'edited'")
    script = f"import sys; sys.path.append({str(project)!r}); import mine; print(mine.VALUE)"
    done = run_program(sys.executable, "-c", script, env={"PYTHONPATH": os.pathsep.join(found.import_path)})
    assert done.stdout == "as submitted\n"


@pytest.fixture
def loaded(project: Path):  # type: ignore[no-untyped-def]
    overrides = ["device=cpu", "train.global_batch_size=null"]
    return load_config(None, overrides=overrides, environ={}, cwd=project)


@pytest.fixture
def plan() -> LaunchPlan:
    return launch_plan(workload=Workload(("python", "train.py")))


@pytest.fixture
def submitted(run: RunDir, project: Path, plan: LaunchPlan) -> RunDir:
    """Return a run with a copy of its project, which has changed since."""
    (project / "train.py").write_text("old\n")
    code = copy_code(project, run, plan.workload)
    write_json(run.job_file, {"cwd": str(project), "code": to_json(code), "attempts": []})
    run.attempt(1).create()
    (project / "train.py").write_text("new\n")
    return run


def test_a_refusal_leaves_the_code_as_it_was(submitted, loaded, plan):
    before = read_job(submitted)
    with pytest.raises(UsageError), renewed_code(submitted, before, loaded.config, plan):  # noqa: PT012
        assert (submitted.code_dir / "train.py").read_text() == "new\n"
        raise UsageError("sbatch: invalid partition specified: typo")
    assert (submitted.code_dir / "train.py").read_text() == "old\n"
    assert read_job(submitted) == before
    assert [path.name for path in submitted.path.glob("code*")] == ["code"]


def test_code_that_cannot_be_recorded_does_not_stay(submitted, loaded, plan, monkeypatch):
    job, stale = read_job(submitted), OSError(errno.ESTALE, "Stale file handle")
    monkeypatch.setattr("trainkit.run.record.read_json", Mock(side_effect=stale))
    with pytest.raises(OSError, match="Stale"), renewed_code(submitted, job, loaded.config, plan):
        pass
    assert (submitted.code_dir / "train.py").read_text() == "old\n"


@pytest.mark.parametrize("end", [None, KeyboardInterrupt], ids=str)
def test_an_attempt_that_may_have_been_submitted_keeps_its_code(submitted, loaded, plan, end):
    expected = pytest.raises(end) if end else nullcontext()
    with expected, renewed_code(submitted, read_job(submitted), loaded.config, plan):
        submitted.attempt(2).create()
        if end:
            raise end
    assert (submitted.code_dir / "train.py").read_text() == "new\n"
    assert (submitted.path / "code.001/train.py").read_text() == "old\n"


def test_a_run_is_judged_in_its_submission_folder(submitted, project, tmp_path):
    here = Path.cwd()
    with submission_folder(read_job(submitted), takes_new_code=False) as code_dir:
        assert (Path.cwd(), code_dir) == (project, submitted.code_dir)
    with submission_folder(read_job(submitted), takes_new_code=True) as code_dir:
        assert code_dir == project
    assert Path.cwd() == here
    project.rename(tmp_path / "moved")
    with submission_folder(read_job(submitted), takes_new_code=True) as code_dir:
        assert (Path.cwd(), code_dir) == (here, here)
    assert Path.cwd() == here


def test_a_script_that_is_named_past_the_copy(run, project, plan):
    (project / "train.py").write_text("old\n")
    past = replace(plan, workload=Workload(("python", f"{project}/train.py", "--data", str(project.parent))))
    code = copy_code(project, run, past.workload)
    said("\n".join(code.notes))


def test_names_of_all_kinds_reach_provenance(project, run, plan):
    git(project, "init")
    for name in (b"two\nlines.py", b"\xff.py", "ü.py".encode(), b" lead\"'$(x).py", b"\xfe.pem"):
        with open(os.fsencode(project) + b"/" + name, "w"):
            pass
    write_json(run.provenance_file, to_json(copy_code(project, run, plan.workload)))
    assert names(run.code_dir) == [" lead\"'$(x).py", ".git", "two\nlines.py", "ü.py", "\udcff.py"]
    read = json.loads(run.provenance_file.read_text())
    assert read["left_out"] == [{"path": "\\xfe.pem", "reason": "looks like a secret"}]
    assert read["workdir"] == read["code"] == str(run.code_dir)
    assert (read["num_files"], read["kind"]) == (4, "git")
