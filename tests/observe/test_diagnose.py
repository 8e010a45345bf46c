"""`diagnose` on broken runs: recorded ones, and a few that are made again."""

from __future__ import annotations

import pytest
import yaml

from tests.support.broken_runs import FOLDER, unpack
from trainkit.observe.diagnose import diagnose
from trainkit.observe.signatures import load_signatures
from trainkit.rundir import RunDir

RECORDED = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def diagnosis_of(name, folder):
    content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    unpack(content, folder)
    run = RunDir(folder)
    attempt = run.attempt(run.attempt_numbers()[-1])
    return content["expect"], diagnose(attempt, load_signatures())


@pytest.mark.parametrize("name", RECORDED)
def test_names_the_first_rank_and_the_cause(name, tmp_path):
    expected, found = diagnosis_of(name, tmp_path)
    shown = {key: getattr(found, key) for key in expected}
    if expected.get("rank", 0) is None:
        shown["rank"] = None  # all ranks fail alike
    assert shown == expected, found
