from trainkit.observe.follow import Line, follow, run_is_over
from trainkit.run.files import write_json
from trainkit.run.rundir import RunDir


def rank_0(attempt):
    return [attempt.rank_log(0)]


def make_run(tmp_path):
    run = RunDir(tmp_path)
    run.attempt(1).create()
    return run


def test_over_all_attempts(tmp_path):
    run = make_run(tmp_path)
    run.attempt(1).rank_log(0).write_text("a\nb\n")
    write_json(run.attempt(1).end_file, {"action": "requeue"})
    run.attempt(2).create()
    run.attempt(2).rank_log(0).write_text("c\n")
    write_json(run.attempt(2).end_file, {"action": "finished"})
    lines = list(follow(run, 1, rank_0, lambda: True))
    assert lines == [Line("rank-0000", text) for text in "abc"]
    assert list(follow(run, 2, rank_0, lambda: True)) == [Line("rank-0000", "c")]
    assert [line.text for line in follow(run, 1, rank_0, lambda: True, last=1)] == ["b", "c"]


def test_what_is_written_while_following(tmp_path):
    run = make_run(tmp_path)
    steps = iter(["a\n", "b\nc", None])

    def alive():
        text = next(steps)
        if text is None:
            return False
        with run.attempt(1).rank_log(0).open("a") as stream:
            stream.write(text)
        return True

    assert [line.text for line in follow(run, 1, rank_0, alive)] == ["a", "b", "c"]


def test_when_a_run_is_over(tmp_path):
    run = make_run(tmp_path)
    assert [run_is_over(run, alive) for alive in (True, None, False)] == [False, False, True]
    write_json(run.attempt(1).end_file, {"action": "requeue"})
    assert [run_is_over(run, alive) for alive in (True, None, False)] == [False, False, True]
    write_json(run.attempt(1).end_file, {"action": "failed"})
    assert [run_is_over(run, alive) for alive in (True, None, False)] == [True, True, True]
