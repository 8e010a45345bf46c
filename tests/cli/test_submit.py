import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from steering import wait_for

from tests.support.json_outputs import checked
from tests.support.programs import is_running, run_program
from tests.support.said import said
from trainkit.run.files import read_json, read_jsonl
from trainkit.run.rundir import RunDir


def test_dry_run_shows_the_plan_that_is_run_and_writes_nothing(desk):
    before = sorted(desk.folder.rglob("*"))
    shown = desk.trainkit("submit", str(desk.config), "--nodes", "2", "--dry-run")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "  lr  " in shown.stdout
    assert len(shown.stdout.splitlines()) < 12
    whole = desk.trainkit("submit", str(desk.config), "--nodes", "2", "--dry-run", "--json")
    assert whole.stderr == shown.stdout
    assert sorted(desk.folder.rglob("*")) == before
    done = desk.trainkit("submit", str(desk.config), "--nodes", "2")
    folder, job_id = done.stdout.splitlines()
    run = RunDir(folder)
    assert read_json(run.plan_file) == json.loads(whole.stdout)
    pid = read_json(run.job_file)["attempts"][0]["pid"]
    assert (run.path, job_id) == (desk.folder / "runs" / "small", f"local-{pid}")
    assert is_running(pid)
    assert (run.path.stat().st_mode & 0o777) == 0o700


def test_json_and_the_new_folder_of_the_same_name(desk):
    done = [desk.trainkit("submit", str(desk.config), "--json") for _ in range(2)]
    first, second = (checked("submit", one.stdout) for one in done)
    assert list(first) == ["run_dir", "name", "job_id", "attempt", "backend", "warnings"]
    assert (first["name"], first["attempt"], first["backend"]) == ("small", 1, "local")
    assert second["name"] == "small-2"
    assert done[1].stderr.startswith("small-2: 1 node x 1 worker")
    assert "note: runs/small" in done[1].stderr
    desk.trainkit("cancel", "small-2", "--now", "--wait")
    assert desk.trainkit("resume", "small-2").stderr.startswith("small-2: 1 node x 1 worker")


def test_run_dir_that_holds_a_run_is_refused_untouched(desk):
    run = desk.submit("--run-dir", str(desk.folder / "mine"))
    desk.trainkit("cancel", str(run.path), "--wait")
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    done = desk.typed("submit", str(desk.config), "--run-dir", str(run.path), code=2)
    assert "already contains a run" in done.stderr
    assert "hint: `trainkit resume" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_follow_shows_the_log_and_ends_with_the_job(desk):
    desk.works("for i in range(3): print('step', i, flush=True)\nsys.stdout.write('no newline')")
    done = desk.trainkit("submit", str(desk.config), "--nodes", "2", "--follow", code=0)
    assert done.stdout.splitlines()[2:] == ["attempt 1 rank 0", "step 0", "step 1", "step 2", "no newline"]
    assert "finished: " in done.stderr


def test_follow_of_a_failure_ends_with_the_verdict(desk):
    desk.works("sys.exit(3 if RANK == 1 else 0)")
    done = desk.trainkit("submit", str(desk.config), "--nodes", "2", "--follow", "--json", code=1)
    assert "rank 1 failed" in done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_ctrl_c_detaches(desk):
    follower = desk.start("submit", str(desk.config), "--follow")
    wait_for(lambda: "attempt 1 rank 0" in follower.stdout.readline())
    follower.send_signal(signal.SIGINT)
    _, words = follower.communicate(timeout=120)
    assert (follower.returncode, "detached; " in words) == (130, True)
    assert desk.status(RunDir(desk.folder / "runs/small"))["state"] in ("starting", "running")


def test_closing_the_terminal_does_not_end_the_job(desk):
    primary, secondary = os.openpty()
    # Under nohup, the tests ignore SIGHUP, and so would the command.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    own = {"stdout": secondary, "stderr": secondary, "start_new_session": True}
    follower = desk.start("submit", str(desk.config), "--follow", **own)
    signal.signal(signal.SIGHUP, before)
    os.close(secondary)
    run = RunDir(desk.folder / "runs/small")
    wait_for(lambda: run.job_file.exists() and read_json(run.job_file)["attempts"])
    desk.wait_for_log(run, "attempt 1 rank 0")
    os.close(primary)
    os.killpg(follower.pid, signal.SIGHUP)
    follower.wait(timeout=120)
    time.sleep(0.3)
    assert desk.status(run)["state"] in ("starting", "running")
    os.kill(read_json(run.job_file)["attempts"][0]["pid"], signal.SIGHUP)
    time.sleep(0.3)
    assert desk.status(run)["state"] in ("starting", "running")


@pytest.mark.parametrize(
    "args", [["submit", "x.yaml", "--dry-run"], ["check", "x.yaml"], ["status"], ["logs", "last"]]
)
def test_torch_is_never_imported(desk, args):
    script = (
        "import sys\nfrom trainkit.cli.main import main\nmain(sys.argv[1:])\n"
        "import trainkit.job.supervisor, trainkit.job.node.agent\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    desk.config.rename(desk.folder / "x.yaml")
    done = run_program(sys.executable, "-c", script, *args, cwd=desk.folder, env=desk.environ)
    assert done.returncode == 0, done.stderr


def test_odd_folder_names_are_only_names(desk):
    folder = str(desk.folder / "a b;'\"$(touch x)\nü")
    done = desk.trainkit("submit", str(desk.config), "--run-dir", folder, "--json")
    assert json.loads(done.stdout)["run_dir"] == folder
    refused = desk.typed("resume", folder, code=2)
    typed = shlex.split(refused.stderr.partition("hint: `trainkit ")[2].partition("` ends")[0])
    assert typed == ["cancel", folder]  # a name without a slash could be another run
    assert desk.trainkit(*typed, "--wait").returncode == 0
    assert not (desk.folder / "x").exists()


@pytest.mark.slow
@pytest.mark.smoke
def test_built_in_trainer_in_slices_on_two_nodes(desk):
    settings = [
        "train.steps=6",
        "train.stop_at_step=3",
        "train.log_every=1",
        "data.seq_len=64",
        "train.eval_every=3",
        "train.eval_batches=2",
        "model.preset=nano",
    ]
    first = ["submit", str(desk.config), "--nodes", "2", *(part for s in settings for part in ("--set", s))]
    done = desk.types(*first, "--follow", code=0)
    run = RunDir(done.stdout.splitlines()[0])
    assert read_json(run.attempt(1).end_file)["state"] == "stopped"
    second = ["resume", "last", "--nodes", "1", "--set", "train.stop_at_step=null", "--follow"]
    done = desk.types(*second, code=0)
    assert read_json(run.attempt(2).end_file)["state"] == "finished"
    steps = [(line["attempt"], line["step"]) for line in read_jsonl(run.metrics_file)]
    assert steps == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6)]
    logs = "".join(log.read_text() for log in run.path.glob("attempts/*/logs/rank-*.log"))
    assert "Warning" not in logs


@pytest.mark.slow
def test_accelerate_gets_what_the_dry_run_shows_and_after_a_resume_what_was_set(desk):
    names = ["ACCELERATE_MIXED_PRECISION", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "WORLD_SIZE"]
    (desk.folder / "shows.py").write_text(f"import os\nprint('got', *(os.environ.get(n) for n in {names}))\n")

    def trainkit(*args):
        done = desk.types(*args, code=0)
        return done

    launch = ["submit", str(desk.config), "--nodes", "2", "--launcher", "accelerate"]
    launch += ["--set", "precision.dtype=bf16"]
    shown = trainkit(*launch, "--dry-run", "--json", "--", "shows.py")
    run = RunDir(trainkit(*launch, "--follow", "--", "shows.py").stdout.splitlines()[0])
    config = run.path / "accelerate.yaml"
    before = config.read_text()
    assert json.loads(shown.stdout) == read_json(run.plan_file)
    assert shown.stderr.endswith(f"==> {config} <==\n{before}")
    assert "got bf16 2 2" in run.attempt(1).rank_log(0).read_text()
    # config.yaml has every key, even parallel.dp_shard: -1, but only keys that were set are passed on.
    trainkit("resume", str(run.path), "--nodes", "1", "--follow")
    assert "got bf16 4 None" in run.attempt(2).rank_log(0).read_text()
    assert config.read_text() == before.replace("MULTI_GPU", "'NO'")
    assert (run.attempt(1).path / config.name).read_text() == before


def test_what_was_typed_wrong(desk):
    for options in (
        *("--sweep optimizer.lrr=1,2", "--sweep seed=1,1", "--array 3-x", "--array %3"),
        *("--sweep seed=1,2 --array 0-1", "--sweep seed=1,2 --follow", "--sweep seed=1,2 --now"),
        *("--after nobody", "--array 0-3 --backend submitit"),
    ):
        value = desk.refused("submit", str(desk.config), *options.split())
        said(f"{value['error']}\n\nhint: {value['hint']}")


def test_a_group_is_one_line_of_status_without_slurm_too(desk, tmp_path):
    from tests.support.groups import make_group

    (tmp_path / "runs").mkdir(exist_ok=True)
    group = make_group(tmp_path, {0: {"seed": 1}, 1: {"seed": 2}})
    group.path.rename(desk.folder / "runs/lr")
    done = desk.typed("status", code=0)
    (row,) = [line for line in done.stdout.splitlines() if "2 unknown" in line]
    assert row.startswith("runs/lr ")
    said(done.stderr)


FINDER = """
import importlib.util, os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        file = {live!r} + "/lib/" + name.replace(".", "/") + ".py"
        if name.partition(".")[0] == "first" and os.path.exists(file):
            return importlib.util.spec_from_file_location(name, file)
        package = {live!r} + "/lib/first/__init__.py"
        if name == "first":
            return importlib.util.spec_from_file_location(
                name, package, submodule_search_locations=[os.path.dirname(package)]
            )
sys.meta_path.insert(0, Finder())
"""
"""An import finder like those with which meson-python and scikit-build-core install an editable project."""


def test_an_editable_install_is_imported_from_the_copy(desk, tmp_path_factory):
    project = desk.folder
    modules = ("src/flat/__init__.py", "src/flat/inner.py", "lib/first/__init__.py", "lib/first/inner.py")
    modules += ("python/deep/other/__init__.py",)
    for name in (*modules, "pyproject.toml"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).touch()
    (project / "train.py").write_text(
        "import flat.inner, first.inner, other, json, sys\n"
        "for module in (flat, flat.inner, first, first.inner, other, json):\n    print(module.__file__)\n"
    )
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=60)
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "flat.pth").write_text(f"{project}/src\n")
    (packages / "deep.pth").write_text(f"{project}/python/deep\n")
    (packages / "finder.py").write_text(FINDER.format(live=str(project)))
    (packages / "first.pth").write_text("import finder\n")
    python = str(environment / "bin/python")
    done = desk.types("submit", str(desk.config), "--follow", "--", python, "train.py", code=0)
    code = project / "runs/small/code"
    assert done.stdout.splitlines()[2:8] == [*(f"{code}/{name}" for name in modules), json.__file__]
