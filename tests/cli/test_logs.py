import json

from tests.support.runs import make_attempt
from tests.support.said import said
from trainkit.cli import logs
from trainkit.cli.logs import print_end
from trainkit.cli.main import main
from trainkit.errors import EXIT_FAILED
from trainkit.run.record import add_slurm_attempt, claim_entry, create_job, read_job
from trainkit.run.rundir import RunDir


def test_ranks_nodes_attempts_and_lines(desk):
    desk.works("for i in range(3): print(i, flush=True)")
    run = desk.submit("--nodes", "2")
    desk.wait_for_end(run)
    assert desk.typed("logs", "last").stdout.splitlines() == ["attempt 1 rank 0", "0", "1", "2"]
    assert desk.typed("logs", "last", "--lines", "2").stdout.splitlines() == ["1", "2"]
    assert desk.typed("logs", "last", "--rank", "1").stdout.splitlines()[0] == "attempt 1 rank 1"
    lines = [f"rank-0001 | {line}" for line in ("attempt 1 rank 1", "0", "1", "2")]
    assert desk.typed("logs", "last", "--node", "1").stdout.splitlines() == lines
    shown = desk.typed("logs", "last", "--all").stdout
    assert {line.split()[0] for line in shown.splitlines()} == {"rank-0000", "rank-0001", "supervisor"}
    followed = desk.trainkit("logs", "last", "-f", "--lines", "1")
    assert (followed.stdout, followed.returncode) == ("2\n", 0)
    assert followed.stderr.startswith("finished: ")
    for args in (["--rank", "5"], ["--attempt", "2"], ["--rank", "0", "--all"]):
        assert "hint:" in desk.typed("logs", "last", *args, code=2).stderr
    run.job_file.unlink()
    assert desk.typed("logs", str(run.path), "--lines", "1").stdout.splitlines() == ["2"]


def test_an_empty_log_is_said_to_be_empty(tmp_path, capsys):
    attempt = make_attempt(tmp_path / "run")
    for text, note in (("", "rank 0 has printed nothing in attempt 1\n"), ("step 1\n", "")):
        attempt.rank_log(0).write_text(text)
        assert main(["logs", str(attempt.run.path), "--rank", "0"]) == 0
        assert tuple(capsys.readouterr()) == (text, note)


def test_a_log_is_not_in_memory(tmp_path, monkeypatch, prints):
    attempt = make_attempt(tmp_path / "run")
    attempt.rank_log(0).parent.mkdir(exist_ok=True)
    attempt.rank_log(0).write_text("one\nthirteen\ntwo")
    monkeypatch.setattr(logs, "MAX_LINE_BYTES", 5)
    said(prints(["logs", str(attempt.run.path)]).out)
    assert prints(["logs", str(attempt.run.path), "--lines", "1"]).out == "two\n"


def test_following_ends_with_how_the_run_ended(desk):
    desk.works("import sys; print('█'); sys.exit(3)")
    run = desk.submit()
    desk.wait_for_end(run)
    followed, status = desk.trainkit("logs", "last", "-f"), desk.typed("status", "last", "--json")
    assert (followed.stdout, followed.returncode) == ("attempt 2 rank 0\n█\n", 1)
    ended = json.loads(status.stdout)
    assert followed.stderr.splitlines()[0] == f"{ended['state']}: {ended['reason']}"
    said(followed.stderr)


def test_a_job_that_ended_before_or_after_its_supervisor_began(tmp_path, capsys):
    run = RunDir(tmp_path)
    run.attempt(1).create()
    create_job(run, backend="sbatch", name="x", cwd=str(tmp_path), code=None)
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    assert print_end(run, read_job(run).attempts[-1]) == EXIT_FAILED
    said(capsys.readouterr().err)
    claim_entry(run, 1, 1)
    run.attempt(1).supervisor_log.write_text("slurmstepd: error\n")
    assert print_end(run, read_job(run).attempts[-1]) == EXIT_FAILED
    said(capsys.readouterr().err)
