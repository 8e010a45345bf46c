import pytest

from trainkit.job.node import health


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Write what the kernel shows of this process's cgroups."""
    monkeypatch.setattr(health, "PROC", tmp_path)
    monkeypatch.setattr(health, "CGROUPS", tmp_path / "sys")
    (tmp_path / "self").mkdir()

    def write(own, file=None, text=""):
        (tmp_path / "self/cgroup").write_text(own)
        if file is not None:
            (tmp_path / "sys" / file).parent.mkdir(parents=True)
            (tmp_path / "sys" / file).write_text(text)

    return write


def test_second_version(cgroups):
    events = "low 0\nhigh 0\nmax 21\noom 3\noom_kill 2\noom_group_kill 0\n"
    cgroups("0::/slurm/job_7/step_0/user/task_0\n", "slurm/job_7/step_0/user/task_0/memory.events", events)
    assert health.count_oom_kills() == 2


def test_first_version(cgroups):
    own = "9:name=systemd:/\n4:memory:/slurm/job_7\n3:cpu,cpuacct:/\n0::/\n"
    cgroups(own, "memory/slurm/job_7/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert health.count_oom_kills() == 5


@pytest.mark.parametrize("own", ["", "0::/\n", "1:cpu:/x\n"])
def test_nobody_counts(cgroups, own):
    cgroups(own)
    assert health.count_oom_kills() is None


def test_an_old_kernel_does_not_count(cgroups):
    cgroups("4:memory:/\n", "memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n")
    assert health.count_oom_kills() is None


def test_no_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(health, "PROC", tmp_path / "none")
    assert health.count_oom_kills() is None
