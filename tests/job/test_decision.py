import pytest

from trainkit.job.decision import combine, decide, describe_exit


@pytest.mark.parametrize(
    ("codes", "request_name", "action", "exit_code"),
    [
        ([0, 0], None, "finished", 0),
        ([0, 0], "SIGTERM", "finished", 0),
        ([75, 75], None, "stopped", 75),
        ([75, 0], "SIGTERM", "stopped", 75),
        ([75, 75], "SIGUSR2", "requeue", 75),
        ([75, 78], "SIGUSR2", "failed", 78),
        ([143, 75], "SIGTERM", "stopped", 75),
        ([140, 75], "SIGUSR2", "requeue", 75),
        ([130, 143], "SIGTERM", "stopped", 75),
        ([70, 70], "SIGUSR2", "requeue", 75),
        ([70, 75], None, "failed", 70),
        ([1, 75], "SIGTERM", "failed", 1),
        ([143, 0], None, "failed", 143),
        ([75, 137, 1], None, "failed", 137),
    ],
)
def test_decide(codes, request_name, action, exit_code):
    decision = decide(codes, request_name, num_requeues=0, max_requeues=1)
    assert (decision.action, decision.exit_code) == (action, exit_code)


def test_cap_on_comebacks():
    decision = decide([75], "SIGUSR2", num_requeues=3, max_requeues=3)
    assert decision.action == "stopped"
    assert (
        decision.reason == "saved after SIGUSR2; not started again: requeue.max is 3 and it came back 3 times"
    )


def test_out_of_time():
    decision = decide([137], "SIGTERM", 0, 1, killed=True)
    assert decision.reason == "killed: not all workers ended within the grace time after SIGTERM"


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0], 0), ([0, 75], 75), ([75, 3, 1], 3), ([1, 78], 78), ([0, 137], 137), ([], 0)],
)
def test_combine(codes, expected):
    assert combine(codes) == expected


def test_describe_exit():
    assert [describe_exit(code) for code in (3, 137, 255)] == ["exit code 3", "SIGKILL", "exit code 255"]
