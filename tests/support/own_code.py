"""Writes the optimizer and the schedule that the docs show, as files of a user."""

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "optimizers.md"


def write_lion(folder: Path) -> str:
    """Write the optimizer, and return the value of `optimizer.name`."""
    (folder / "my_lion.py").write_text(_example("Your own optimizer in 30 lines"))
    return f"{folder}/my_lion.py:Lion"


def write_schedule(folder: Path) -> str:
    """Write the schedule, and return the value of `schedule.name`."""
    (folder / "my_schedule.py").write_text(_example("Your own schedule"))
    return f"{folder}/my_schedule.py:inverse_sqrt"


def _example(section: str) -> str:
    """Return the first Python example of a section of the docs, which has at most 30 lines."""
    code = DOCS.read_text().split(f"\n## {section}\n")[1].split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 30
    return code
