"""Runs small programs that follow a run with `trainkit wait` alone, such as those in docs/programs.md."""

import os
import re
import sys
from pathlib import Path

import pytest
import steering
from steering import Desk

from tests.support.programs import run_program
from tests.test_docs import blocks, page_named

PAGE = page_named("programs.md")
WORKER = """
stays = "stays" in RUN_DIR
done = open(f"{RUN_DIR}/metrics.jsonl").readlines() if os.path.exists(f"{RUN_DIR}/metrics.jsonl") else []
for step in range(len(done) + 1, 7):
    with open(f"{RUN_DIR}/metrics.jsonl", "a") as file:
        file.write(json.dumps({"attempt": ATTEMPT, "step": step, "loss": 1 / step}) + "\\n")
    while step == 3 and stays and not asked:
        time.sleep(0.02)
    if step == 3 and ATTEMPT == 1:
        sys.exit(75)
"""
"""A rank of six steps: at step 3, it waits for a signal, or saves and stops."""
SHELL_LOOP = blocks(PAGE, "bash")[0]
RULE = re.search(r'shell:\s+"(.*)"', blocks(PAGE, "snakemake")[0])[1].replace("{input}", "mine.yaml")  # type: ignore[index]
POLLER = blocks(PAGE, "python")[0]
POLL = """
import time
polls = 0
while not has_finished("runs/polled"):
    polls += 1
    time.sleep(0.2)
assert polls
"""
PROGRAMS = {
    "a run that finishes": (
        "submit runs/both; trainkit wait runs/both || trainkit resume runs/both; trainkit wait runs/both",
        0,
    ),
    "a timeout": (
        "submit runs/stays; trainkit wait runs/stays --for step=2; trainkit wait runs/stays --timeout 0.5",
        124,
    ),
    "a run that is cancelled meanwhile": (
        "submit runs/now-stays; trainkit wait runs/now-stays & "
        "trainkit wait runs/now-stays --for step=3; trainkit cancel runs/now-stays; wait $!",
        1,
    ),
    "a group": ("submit runs/group --sweep seed=1,2; trainkit wait runs/group", 75),
    "a shell loop": (SHELL_LOOP, 0),
    "a Snakemake rule": (f"set -e; {RULE} || trainkit resume runs/mine; {RULE}", 0),
    "a poller": (f"submit runs/polled; python - <<'END'\n{POLLER}{POLL}END", 0),
}
"""Maps a program to its text, in bash, and its exit code."""
BEGIN = 'submit() { trainkit submit mine.yaml --set requeue.max=0 --run-dir "$@"; }\n'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """Return a folder in which `trainkit` and `python` are on PATH, and whose ranks are small scripts."""
    desk = Desk(tmp_path_factory.mktemp("programs"))
    desk.works(WORKER)
    desk.config.rename(desk.folder / "mine.yaml")
    programs = desk.folder / "bin"
    programs.mkdir()
    driver = Path(steering.__file__).with_name("driver.py")
    for name, words in {"trainkit": (driver, desk.worker), "python": ()}.items():
        line = " ".join(f"'{word}'" for word in (sys.executable, *words))
        (programs / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
        (programs / name).chmod(0o755)
    desk.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return desk


@pytest.mark.slow(seconds=8)
@pytest.mark.xdist_group("programs")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_needs_only_wait(name, place):
    text, code = PROGRAMS[name]
    try:
        done = run_program("bash", "-c", BEGIN + text, cwd=place.folder, env=place.environ, timeout=180)
    finally:
        place.tidy()  # the runs of the other programs need the cores
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"


def test_the_page_shows_every_exit_code():
    shown = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE)}
    assert shown == {0, 1, 2, 75, 124, 130}
