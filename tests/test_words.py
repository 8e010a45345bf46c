"""Checks that abandoned words and phrases appear nowhere in code and docs."""

import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("words")  # one process reads all files once

ROOT = Path(__file__).resolve().parents[1]
WORDS = (
    *("station", "comeback", "comebacks", "crew", "glance", "beside", "surroundings", "troubles", "moments"),
    *("meeting", "pulse", "steer", "strike", "aim", "told", "tell"),
)
"""Words that the names of files, functions and classes do not contain, so `CrewLog` is not allowed."""

PHRASES = {
    "goes on": r"\b(?:go|goes|going|went) on\b",
    "comes back": r"\b(?:come|comes|came|coming) back\b",
    "the very losses": r"\bthe very\b",
    "held against": r"\b(?:held|hold|holds) (?:\w+ )?(?:\w+ )?against\b",
    "who, without a noun": r"\bWho\b(?![^.\n]*\?)|\b(?:for|by|of|to|from|than|with|but|since) who\b",
    "so many": r"\bso many\b(?! that)",
    "beside": r"\b[Bb]eside\b",
    "is told": r"\b(?:is|are|was|were|be|been|being) told\b",
    "holds (a file)": (
        r"\b(?:file|folder|line|test|config|tree|text|directory|package|manifest|record|wheel)s? holds?\b"
        r"|\balready holds\b|\bdoes not hold\b(?! the lock)|\bholds no\b|\bholds at least\b"
    ),
    "a look": r"\b(?:a|one|the|first|second) look\b",
    "a word": r"\b(?:without|said|says|say|left|leaves|leave) (?:\w+ )?a word\b|\ba word (?:about|for)\b",
    "as it stands": r"\bas (?:it|they) stands?\b",
    "That of a neighbour": r'"""(?:That|Those|Ditto|Likewise)\b',
}
"""Maps a phrase to its pattern. A space matches any white space, also a line break in a comment.

Legitimate uses are not matched: a rank that holds a shard, a lock that is held, `besides`, a user who
does something, and questions that begin with Who.
"""


@cache
def texts() -> dict[Path, str]:
    """Return every text except this one."""
    found = [
        ROOT / "README.md",
        ROOT / "Makefile",
        ROOT / "tests" / "README.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
    found += [*(ROOT / "templates").rglob("*.j2"), *(ROOT / "configs").rglob("*.yaml")]
    found += {*(ROOT / "trainkit").rglob("*.py"), *(ROOT / "tests").rglob("*.py")} - {Path(__file__)}
    return {path: path.read_text(encoding="utf-8") for path in sorted(found)}


def test_no_name_of_the_package_contains_a_word_that_was_given_up() -> None:
    word = re.compile(rf"(?:^|_)(?:{'|'.join(WORDS)})(?:_|$)")
    for path in (path for path in texts() if path.is_relative_to(ROOT / "trainkit")):
        names = [path.stem, *re.findall(r"(?m)^\s*(?:async )?(?:def|class) (\w+)[(:]", texts()[path])]
        snake = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() for name in names]
        assert [name for name in snake if word.search(name)] == [], path


@pytest.mark.parametrize("phrase", PHRASES)
def test_no_text_contains_a_phrase_that_was_given_up(phrase: str) -> None:
    pattern = re.compile(PHRASES[phrase].replace(" ", r"\s+(?:#\s+)?"))
    assert [(path, found[0]) for path, text in texts().items() if (found := pattern.search(text))] == []
