"""Checks that abandoned names and phrases appear nowhere in code and docs.

Names are checked where they are defined (files, classes, functions, parameters, variables). Phrases are
checked in the whole text of the package, its tests, README, docs, templates, configs and Makefile.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

# One process parses all files once for all tests.
pytestmark = pytest.mark.xdist_group("words")

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TESTS = ROOT / "trainkit", ROOT / "tests"

GIVEN_UP_MODULES = (
    *("station", "slurm_place", "take", "mark", "fence", "points", "space", "comeback", "crew", "why"),
    *("children", "glance", "beside", "look", "own_state", "interrupts", "index", "wait", "steer"),
    *("surroundings", "troubles", "moments", "own_choice", "asked", "draft", "meeting", "pulse", "passes"),
    *("aim", "strike", "play", "exposed", "frozen", "shorten"),
)
"""Names that do not describe a file's content. Functions may still be called `watch`, `wait` and so on."""

UNIQUE_MODULES = ("stacks", "verdict", "campaign", "batch")
"""Names that several files had. A command of the same name in cli/ has another role."""

GIVEN_UP_WORDS = (
    *("station", "comeback", "comebacks", "crew", "glance", "beside", "surroundings", "troubles", "moments"),
    *("meeting", "pulse", "steer", "strike", "aim", "told", "tell"),
)
"""Words that no defined name contains, so `find_comebacks` and `CrewLog` are not allowed."""

GIVEN_UP_NAMES = (
    *("let_go", "look_around", "Past", "End", "Means", "Look", "JobNow", "own_state", "own_choice"),
    *("fence", "play", "Hand", "Held", "Seen", "refuse_a_crowd", "goes_on", "comes_back", "say"),
)
"""Whole names, whose words are allowed in other names."""

PHRASES = {
    "goes on": r"\b(?:go|goes|going|went) on\b",
    "comes back": r"\b(?:come|comes|came|coming) back\b",
    "comeback": r"(?<![\"'])\bcomebacks?\b(?![\"'])",
    "the very losses": r"\bthe very\b",
    "has to be there before": r"\bhas to be there\b",
    "what to type next": r"\bto type next\b",
    "rides along": r"\brides? along\b",
    "nothing moves": r"\bnothing moves\b",
    "the one that the others wait for": r"\bthe others wait for\b",
    "left out of your next jobs": r"\bleft out of your next\b",
    "held against": r"\b(?:held|hold|holds) (?:\w+ )?(?:\w+ )?against\b",
    "words go to stderr": r"\b[Ww]ords go to\b|\bstderr is words\b",
    "who, without a noun": r"\bWho\b(?![^.\n]*\?)|\b(?:for|by|of|to|from|than|with|but|since) who\b",
    "because of which": r"\bbecause of which\b",
    "time line": r"\b[Tt]ime line\b",
    "there is no module here": r"\bthere is no module \S+ here\b",
    "--option is VALUE": r"\"--[a-z-]+ is \{\w+\}\"",
    "so many": r"\bso many\b(?! that)",
    "are the most": r"\bare the most\b",
    "beside": r"\b[Bb]eside\b",
    "is told": r"\b(?:is|are|was|were|be|been|being) told\b",
    "holds (a file)": (
        r"\b(?:file|folder|line|test|config|tree|text|directory|package|manifest|record|wheel)s? holds?\b"
        r"|\balready holds\b|\bdoes not hold\b(?! the lock)|\bholds no\b|\bholds at least\b"
    ),
    "holds (a check)": r"\b(?:all|this|drill|verdict|scenario|all that) holds?\b(?! (?:the|a|its|no|one) )",
    "a look": r"\b(?:a|one|the|first|second) look\b",
    "a word": r"\b(?:without|said|says|say|left|leaves|leave) (?:\w+ )?a word\b|\ba word (?:about|for)\b",
    "the same again": r"\bthe same again\b",
    "as it stands": r"\bas (?:it|they) stands?\b",
    "That of a neighbour": r'"""(?:That|Those|Ditto|Likewise)\b',
}
"""Maps a phrase to its pattern. A space matches any white space, also a line break in a comment.

Legitimate uses are not matched: a GPU or a rank that holds a shard, a lock that is held, a word of bash,
`besides`, a user who does something, and questions that begin with Who.
"""


def names_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every name that a file defines, with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


@cache
def definitions() -> tuple[tuple[str, str], ...]:
    """Return every name that the package and its tests define, with its place."""
    return tuple(
        (name, f"{path.relative_to(ROOT)}:{line}")
        for path in sorted([*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py")])
        for name, line in names_of(path)
    )


@cache
def words_of(name: str) -> set[str]:
    """Return the words of a name: find and comeback for ``find_Comeback`` and ``FindComeback``."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


@cache
def texts() -> tuple[tuple[str, str], ...]:
    """Return every text except this one, by its path."""
    paths = [*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "templates").rglob("*.j2")]
    paths += [*(ROOT / "configs").rglob("*.yaml"), ROOT / "README.md", ROOT / "Makefile", TESTS / "README.md"]
    paths += {*TESTS.rglob("*.py")} - {Path(__file__)}
    return tuple((str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in sorted(paths))


def test_no_file_has_a_name_that_was_given_up() -> None:
    paths = [*PACKAGE.rglob("*"), *TESTS.rglob("*")]
    assert [path for path in paths if path.stem.removeprefix("test_") in GIVEN_UP_MODULES] == []
    counts = Counter(path.stem for path in PACKAGE.rglob("*.py") if path.parent.name != "cli")
    assert max(counts[name] for name in UNIQUE_MODULES) <= 1


JSON_KEYS = {"moments_bytes"}
"""Keys of JSON outputs, which keep their names because programs read them."""


def test_no_definition_has_a_name_or_a_word_that_was_given_up() -> None:
    found = [
        f"{place}: {name}"
        for name, place in definitions()
        if name not in JSON_KEYS
        and (name.lstrip("_") in GIVEN_UP_NAMES or not words_of(name).isdisjoint(GIVEN_UP_WORDS))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("phrase", PHRASES)
def test_no_text_contains_a_phrase_that_was_given_up(phrase: str) -> None:
    pattern = re.compile(PHRASES[phrase].replace(" ", r"\s+(?:#\s+)?"))
    found = []
    for name, text in texts():
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{name}:{line}: {' '.join(match[0].split())}")
    assert not found, "\n".join(found)
