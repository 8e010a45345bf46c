"""Tests the limit on the GPU-hours of a submission."""

from pathlib import Path

import pytest

from tests.support.said import said
from trainkit.cli.main import main

EXAMPLE = ("--cluster", "example", "--backend", "sbatch", "--set", "device=cuda")
"""The options of a run on a cluster with GPUs that exists only as a profile."""
ONCE = ("--set", "requeue.max=0")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def submit(*options: str) -> int:
    return main(["submit", "quickstart", "--dry-run", *EXAMPLE, *options])


@pytest.mark.parametrize(
    ("limit", "options"),
    [
        ("404", ["--gpus-per-node", "4"]),  # 101 jobs
        ("4", ["--gpus-per-node", "4", *ONCE]),
        ("4", ["--gpus-per-node", "4", "--set", "requeue.on=[]"]),
        ("12", ["--gpus-per-node", "4", "--slice", "30", "--time", "3:00:00"]),
        ("48", ["--gpus-per-node", "8", "--nodes", "2-4", "--set", "requeue.max=1", "--time", "45"]),
        ("32", ["--gpus-per-node", "8", "--nodes", "2", "--set", "resources.spare_nodes=2", *ONCE]),
        ("12", ["--gpus-per-node", "4", "--sweep", "seed=1,2,3", *ONCE]),
        ("12", ["--gpus-per-node", "4", "--array", "0-2%1", *ONCE]),
        ("12", ["--gpus-per-node", "4", "--sweep", "requeue.max=0,1"]),
        ("8", ["--gpus-per-node", "8", *ONCE, "--", "sleep", "1"]),
    ],
)
def test_a_submission_at_the_limit(
    limit: str, options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert submit("--max-gpu-hours", limit, *options) == 0, capsys.readouterr().err
    said(shown_hours(capsys.readouterr().err))
    assert submit("--max-gpu-hours", str(float(limit) - 0.1), *options) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    said(shown.err.partition("error: ")[2])
    assert not Path("runs").exists()


def test_a_limit_of_the_site(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile's limit applies to every run, and a user can raise it."""
    profile = Path("clusters/mine.yaml")
    profile.parent.mkdir()
    limit = "defaults: {resources: {max_gpu_hours: 5.5}}"
    profile.write_text(f"name: mine\n{limit}\npartitions: {{gpu: {{default: true, nodes: [{{gpus: 4}}]}}}}\n")
    options = ("--cluster", "mine", "--set", "device=cuda", "--gpus-per-node", "4")
    assert main(["submit", "quickstart", "--dry-run", *options]) == 2
    said(capsys.readouterr().err)
    assert main(["check", "quickstart", "--no-estimate", *options]) == 2
    assert main(["check", "quickstart", "--no-estimate", *options, "--max-gpu-hours", "404"]) == 0
    # Without a time limit, the number of GPU-hours is unknown.
    assert main(["check", "quickstart", *options, "--set", "resources.time=null"]) == 2
    assert "resources.time" in capsys.readouterr().err


def shown_hours(text: str) -> str:
    """Return the line about GPU-hours in the output of `submit`; there must be exactly one."""
    [line] = [line for line in text.splitlines() if line.startswith("  gpu_hours ")]
    return " ".join(line.split())


def test_a_run_on_cpus_is_not_limited_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["quickstart", "--max-gpu-hours", "0.001", *EXAMPLE[:4], "--set", "device=cpu"]
    assert main(["submit", "--dry-run", *options]) == 0
    said(shown_hours(capsys.readouterr().err))
    assert main(["check", "--no-estimate", *options]) == 0
    assert "gpu_hours: none, because device is cpu" in capsys.readouterr().out
    assert submit("--gpus-per-node", "1") == 0
    assert "gpu_hours" not in capsys.readouterr().err  # without a limit, nothing is counted


@pytest.mark.parametrize(
    ("partition", "options", "count"),
    [
        ("", ["--set", "resources.extra.exclusive=true"], "8"),
        ("exclusive: true, ", [], "8"),
        ("exclusive: true, ", ["--set", "device=cpu"], "8"),
        ("", ["--set", "resources.extra.exclusive=user"], "1"),
    ],
)
def test_all_gpus_of_whole_nodes_count(
    partition: str, options: list[str], count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm charges a job with `--exclusive`, or in an exclusive partition, for all GPUs of its nodes."""
    profile = Path("clusters/mine.yaml")
    profile.parent.mkdir()
    profile.write_text(
        f"name: mine\npartitions: {{gpu: {{{partition}default: true, nodes: [{{gpus: 8}}]}}}}\n"
    )
    given = ["--cluster", "mine", "--set", "device=cuda", "--gpus-per-node", "1", *ONCE, *options]
    assert main(["submit", "quickstart", "--dry-run", *given, "--max-gpu-hours", count]) == 0
    said(shown_hours(capsys.readouterr().err))
    assert main(["submit", "quickstart", "--dry-run", *given, "--max-gpu-hours", f"{int(count) - 0.1}"]) == 2


def test_a_limit_without_effect_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    main(["submit", "quickstart", "--dry-run", "--backend", "local", "--max-gpu-hours", "1"])
    assert ": no effect" in "".join(capsys.readouterr())


def test_a_limit_of_a_tenth_is_exact() -> None:
    """The sum of three tenths is more than 0.3 in binary."""
    options = ("--gpus-per-node", "1", "--time", "6", "--array", "0-2", *ONCE)
    assert submit("--max-gpu-hours", "0.3", *options) == 0


def test_nodes_auto_chooses_within_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """Slurm is not asked about node counts above the limit."""
    assert submit("--gpus-per-node", "4", "--nodes", "auto", "--max-gpu-hours", "4", *ONCE) == 0


def test_a_number_that_is_no_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--max-gpu-hours", "0") == 2
    assert "--max-gpu-hours" in capsys.readouterr().err
