"""Provides fake commands of Slurm for failures that are rare with the real ones."""

from pathlib import Path

import pytest


class FakeSlurm:
    """A folder that is all of PATH. Its programs run what a test defines, and record their calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls_file = folder / "calls"

    @property
    def environ(self) -> dict[str, str]:
        """Return an environment with only PATH."""
        return {"PATH": str(self.folder / "bin")}

    def add(self, program: str, body: str = "") -> None:
        """Add a program with a shell `body`, where `$n` is the number of calls and `$here` a folder."""
        counter = self.folder / f"{program}.count"
        script = (
            "#!/bin/sh\n"
            f"here='{self.folder}'\n"
            f"n=0; [ -e '{counter}' ] && read n < '{counter}'; n=$((n + 1)); echo $n > '{counter}'\n"
            # The call is written at once, because programs run in parallel. The dot keeps newlines at the
            # end.
            f"call=$(printf %s {program}; [ $# = 0 ] || printf '\\001%s' \"$@\"; printf '\\002.')\n"
            f"printf %s \"${{call%.}}\" >> '{self.calls_file}'\n"
            f"{body}\n"
        )
        path = self.folder / "bin" / program
        path.parent.mkdir(exist_ok=True)
        path.write_text(script)
        path.chmod(0o755)

    def shows(self, **texts: str) -> None:
        """Let `scontrol show NAME`, also after an option, print a text for each name."""
        for name, text in texts.items():
            (self.folder / name).write_text(text)
        self.add("scontrol", '[ "$1" = show ] || shift; [ ! -e "$here/$2" ] || /bin/cat "$here/$2"')

    @property
    def calls(self) -> list[list[str]]:
        """Return every call, with the program as its first item."""
        text = self.calls_file.read_text() if self.calls_file.exists() else ""
        return [call.split("\1") for call in text.split("\2") if call]

    @property
    def programs(self) -> list[str]:
        """Return the programs that were called, in order."""
        return [call[0] for call in self.calls]


@pytest.fixture
def fake(tmp_path: Path) -> FakeSlurm:
    """Return a fake Slurm without commands, to which a test adds programs."""
    folder = tmp_path / "slurm"
    (folder / "bin").mkdir(parents=True)
    return FakeSlurm(folder)
