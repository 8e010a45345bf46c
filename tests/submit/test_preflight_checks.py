"""Commands that cannot start, as far as can be told before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainkit.config import RunConfig
from trainkit.errors import UsageError
from trainkit.submit.preflight_checks import refuse_missing

LAUNCH = RunConfig().launch


@pytest.mark.parametrize("command", [["no/such.py"], ["-u", "no/such.py", "--out", "made.py"]])
def test_a_script_that_is_not_there(tmp_path: Path, command: list[str]) -> None:
    with pytest.raises(UsageError, match=r"there is no no/such.py in"):
        refuse_missing([sys.executable, *command], LAUNCH, "python", tmp_path)


@pytest.mark.parametrize("command", [["-m", "package", "--out", "made.py"], ["-c", "import made", "made.py"]])
def test_a_file_that_is_no_script_of_the_command(tmp_path: Path, command: list[str]) -> None:
    refuse_missing([sys.executable, *command], LAUNCH, "python", tmp_path)


def test_a_line_of_setup_may_go_where_the_script_is(tmp_path: Path) -> None:
    launch = LAUNCH.model_copy(update={"setup": ("cd src",)})
    refuse_missing(["python", "train.py"], launch, "python", tmp_path)
