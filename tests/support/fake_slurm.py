"""Fake commands of Slurm, for what the real ones do only on a bad day."""

from __future__ import annotations

from pathlib import Path

import pytest


class FakeSlurm:
    """A folder that is all of PATH; its programs do what a test says and write down how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls_file = folder / "calls"

    @property
    def environ(self) -> dict[str, str]:
        """Nothing but PATH."""
        return {"PATH": str(self.folder / "bin")}

    def add(self, program: str, body: str = "") -> None:
        """A program; `body` is shell, with `$n` for how often it has been called and `$here` for a folder."""
        counter = self.folder / f"{program}.count"
        script = (
            "#!/bin/sh\n"
            f"here='{self.folder}'\n"
            f"n=0; [ -e '{counter}' ] && read n < '{counter}'; n=$((n + 1)); echo $n > '{counter}'\n"
            # Written at once, because some are called at the same time; the dot keeps newlines at the end.
            f"call=$(printf %s {program}; [ $# = 0 ] || printf '\\001%s' \"$@\"; printf '\\002.')\n"
            f"printf %s \"${{call%.}}\" >> '{self.calls_file}'\n"
            f"{body}\n"
        )
        path = self.folder / "bin" / program
        path.parent.mkdir(exist_ok=True)
        path.write_text(script)
        path.chmod(0o755)

    @property
    def calls(self) -> list[list[str]]:
        """Every call, with the program in front."""
        text = self.calls_file.read_text() if self.calls_file.exists() else ""
        return [call.split("\1") for call in text.split("\2") if call]

    @property
    def programs(self) -> list[str]:
        """The programs that were called, in order."""
        return [call[0] for call in self.calls]


@pytest.fixture
def fake(tmp_path: Path) -> FakeSlurm:
    """No Slurm at all, until a test adds its programs."""
    folder = tmp_path / "slurm"
    (folder / "bin").mkdir(parents=True)
    return FakeSlurm(folder)
