import json

from tests.support.json_outputs import checked
from tests.support.said import said
from trainkit.run.files import read_json, write_json
from trainkit.run.manifest import MANIFEST_VERSION, SEAL, file_hash, published, seal
from trainkit.run.rollbacks import read_rollbacks
from trainkit.run.rundir import RunDir


def ended_run(desk, code=75):
    """Return an ended run with this exit code. The default code means that the run can resume."""
    desk.works(f"sys.exit({code} if ATTEMPT == 1 else 0)")
    run = desk.submit()
    desk.wait_for_end(run)
    return run


def publish(run, step):
    folder = run.checkpoint_dir(step)
    folder.mkdir()
    (folder / "data").write_text(str(step))
    files = {"data": {"bytes": len(str(step)), "sha256": file_hash(folder / "data")}}
    manifest = {"version": MANIFEST_VERSION, "step": step, "files": files}
    write_json(folder / "manifest.json", {**manifest, SEAL: seal(manifest)})


def test_live_run_is_refused(desk):
    run = desk.submit()
    done = desk.typed("resume", "last", code=2)
    assert f"local-{read_json(run.job_file)['attempts'][0]['pid']}" in done.stderr
    assert "`trainkit cancel " in done.stderr
    assert run.attempt_numbers() == [1]


def test_resume_on_more_workers_with_another_value(desk):
    run = ended_run(desk)
    args = ("--nodes", "2", "--gpus-per-node", "2", "--set", "seed=7", "--follow")
    done = desk.trainkit("resume", "small", *args, code=0)
    assert "attempt 2 rank 0" in done.stdout
    assert not {"step 0", "beginning"} & {*done.stderr.split()}, "it has saved, and knows where it resumes"
    assert [read_json(run.attempt(number).plan_file)["world_size"] for number in (1, 2)] == [1, 4]
    assert read_json(run.plan_file)["world_size"] == 4
    assert "seed: 0" in run.attempt(1).config_file.read_text()
    assert "seed: 7" in run.config_file.read_text()
    assert [entry["reason"] for entry in read_json(run.job_file)["attempts"]] == ["submit", "resume"]


def test_a_run_without_a_checkpoint_starts_at_step_0_and_says_so(desk):
    run = ended_run(desk)
    run.plan_file.write_text(json.dumps(read_json(run.plan_file) | {"command": None}))
    done = desk.typed("resume", "small", "--as", "fork")
    assert (done.returncode, (desk.folder / "fork").exists()) == (2, False)
    said(done.stderr)
    done = desk.trainkit("resume", "small", code=0)
    assert "checkpoint          no checkpoint yet" in done.stderr


def test_a_command_without_a_save_starts_at_the_beginning_and_says_so(desk):
    desk.works("sys.exit(78)")
    run = desk.submit()
    desk.wait_for_end(run)
    done = desk.trainkit("resume", "small", "--follow")
    assert "reported no saved" in done.stderr
    publish(run, 5)
    assert "reported no saved" not in desk.trainkit("resume", "small", "--follow").stderr


def test_the_steps_of_the_config_do_not_count_for_a_command(desk):
    run = ended_run(desk)
    publish(run, 20_000)
    desk.trainkit("resume", "small", "--set", "train.steps=200", "--follow", code=0)


def test_a_dry_run_shows_the_next_attempt_and_writes_nothing(desk):
    run = ended_run(desk)
    publish(run, 20)
    (desk.folder / "added.py").write_text("")
    desk.works("sys.exit(0)")

    def files():
        return {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}

    before = files()
    words = ("resume", "small", "--nodes", "2", "--gpus-per-node", "2", "--dry-run")
    done = desk.typed(*words, "--new-code", "--json", code=0)
    assert (json.loads(done.stdout)["world_size"], files()) == (4, before)
    assert "checkpoint          step-00000020" in done.stderr
    assert "changed: worker.py; new: added.py\n" in done.stderr
    done = desk.typed(*words, code=0)
    assert "(changed: worker.py); --new-code uses" in done.stderr
    done = desk.typed(*words, "--as", "fork", code=0)
    assert (done.stdout, (desk.folder / "fork").exists()) == ("", False)
    desk.typed(*words, "--as", "state", code=2)
    desk.trainkit("resume", "small", "--follow", code=0)


def test_resume_from_another_folder_works_where_it_was_submitted(desk):
    desk.works("print(os.getcwd()); sys.exit(75 if ATTEMPT == 1 else 0)")
    run = desk.submit()
    desk.wait_for_end(run)
    home, desk.folder = desk.folder, desk.folder / "state"
    assert desk.trainkit("resume", str(run.path), "--follow").returncode == 0
    desk.folder = home
    assert f"{home}/runs/small/work" in run.attempt(2).rank_log(0).read_text().splitlines()


def test_two_resumes_at_once_start_one_attempt(desk):
    run = ended_run(desk)
    desk.works("time.sleep(600)")
    both = [desk.start("resume", str(run.path)) for _ in range(2)]
    words = [process.communicate(timeout=120)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2]
    assert sum("is running as" in text for text in words) == 1
    assert run.attempt_numbers() == [1, 2]


def test_fork_starts_from_a_copy_of_the_newest_published_checkpoint(desk):
    run = ended_run(desk)
    for step in (100, 200):
        publish(run, step)
    (run.checkpoints_dir / "step-00000300.partial").mkdir()
    run.checkpoint_dir(400).mkdir()
    done = desk.trainkit("resume", "small", "--as", "forks/longer", "--json", code=0)
    fork = RunDir(checked("resume", done.stdout)["run_dir"])
    assert [path.name for path in fork.checkpoints_dir.iterdir()] == ["step-00000200"]
    assert (fork.checkpoint_dir(200) / "data").samefile(run.checkpoint_dir(200) / "data")
    assert run.attempt_numbers() == [1]
    desk.wait_for_end(fork)


def test_a_finished_run_names_what_extends_it(desk):
    run = ended_run(desk, 0)
    publish(run, 10)
    run.plan_file.write_text(json.dumps(read_json(run.plan_file) | {"command": None}))
    for more in ([], ["--as", "fork"], ["--set", "optimizer.lr=1e-4"]):
        done = desk.typed("resume", "small", *more, code=2)
        said(done.stderr)


def test_a_finished_command_names_what_repeats_it(desk):
    run = ended_run(desk, 0)
    refused = desk.typed("resume", "small", "--nodes", "1", code=2)
    said(refused.stderr)
    assert run.attempt_numbers() == [1]
    for number, words in enumerate((["requeue"], ["resume", "--new-code"], ["resume", "--set", "seed=7"]), 2):
        assert desk.trainkit(*words, "runs/small").returncode == 0
        desk.wait_for_end(run, number)


def test_a_run_of_this_machine_does_not_go_to_slurm_unasked(desk):
    run = ended_run(desk)
    programs = desk.folder / "programs"
    programs.mkdir()
    (programs / "sbatch").symlink_to("/bin/false")
    desk.environ |= {"PATH": f"{programs}:{desk.environ['PATH']}", "SLURM_CONF": "/nowhere/slurm.conf"}
    done = desk.trainkit("resume", "small", code=0)
    assert "; --backend sbatch submits" in done.stderr
    desk.wait_for_end(run, 2)
    assert "sbatch: exit code 1" in desk.trainkit("resume", "small", "--backend", "sbatch").stderr


def test_go_back_and_leave_out_samples(desk):
    run = ended_run(desk)
    run.plan_file.write_text(json.dumps(read_json(run.plan_file) | {"command": None}))
    for step in (10, 20):
        publish(run, step)
    options = ("--from-step", "10", "--skip-samples", "5-9", "--skip-samples", "3-5")
    line = "rollback            went back from step 20 to step 10, left out 7 samples (3-9)"
    done = desk.typed("resume", "small", *options, "--dry-run", code=0)
    assert line in done.stderr
    assert "checkpoint          step-00000010 or" in done.stderr
    assert not run.rollbacks_file.exists()
    done = desk.typed("resume", "small", *options, "--as", "fork", code=0)
    copy = RunDir(desk.folder / "fork")
    desk.wait_for_end(copy)
    assert [checkpoint.step for checkpoint in published(copy.checkpoints_dir)] == [10]
    assert read_rollbacks(copy)[0].skipped == ((3, 10),)
    assert not run.rollbacks_file.exists()
    done = desk.typed("resume", "small", *options, code=0)
    assert line in done.stderr
    desk.wait_for_end(run)
    [rollback] = read_rollbacks(run)
    assert (rollback.step, rollback.from_step, rollback.attempt, rollback.skipped) == (10, 20, 1, ((3, 10),))
    desk.typed("resume", "small", "--skip-samples", "3", code=2)
