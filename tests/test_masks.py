"""Tests which values are masked in texts and command lines, and which similar ones are not."""

import re
import shlex
import time
from pathlib import Path

import pytest

from trainkit.formats import mask_secrets
from trainkit.launch.secrets import secret_options, without_secrets

TEXTS, COMMANDS, HARMLESS = (
    [line.replace("⏎", "\n") for line in part.splitlines() if line and not line.startswith("# ")]
    for part in re.split(
        "^# (?:commands|harmless)$", (Path(__file__).parent / "masks.txt").read_text(), flags=re.M
    )
)
"""Lines with «marks» around the values that are masked, where ⏎ is the end of a line, and harmless lines."""


def with_and_without(line: str) -> tuple[str, str]:
    """Return a line with its secrets, and the line that is printed."""
    return re.sub("[«»]", "", line), re.sub("«.*?»", "***", line, flags=re.DOTALL)


@pytest.mark.parametrize("line", TEXTS)
def test_a_secret_in_a_text(line: str) -> None:
    text, expected = with_and_without(line)
    assert mask_secrets(text) == mask_secrets(expected) == expected


@pytest.mark.parametrize("line", COMMANDS)
def test_a_secret_in_a_command(line: str) -> None:
    command, expected = with_and_without(line)
    assert without_secrets(shlex.split(command), ()) == shlex.split(expected)
    assert without_secrets(["sh", "-c", command], ()) == ["sh", "-c", expected]
    assert mask_secrets(command) == expected


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret(text: str) -> None:
    assert mask_secrets(text) == text
    assert without_secrets(words := shlex.split(text.replace("<", r"\<")), ()) == words
    assert without_secrets(["sh", "-c", text], ()) == ["sh", "-c", text]
    assert list(secret_options(words)) == []


def test_a_warning_names_options_without_their_values() -> None:
    command = (
        "train https://me:hunter2222@h?x=1 --url=https://h?sig=hunter2222 -pHunter2222 --api-key hunter2222"
    )
    found = list(secret_options(shlex.split(command)))
    assert found == ["an argument", "--url", "an argument", "--api-key"]


def test_a_long_text_is_masked_in_time() -> None:
    line = (
        "step 100 loss 2.31 tokens_per_s 12345 path /home/me/a-b_c-d_e-f/g-h_i-j?x=1&y=2 --set a.b_c=1 " * 4
    )
    start = time.process_time()
    mask_secrets(f"{line}\n" * 300)
    mask_secrets("a_b-" * 5000)
    assert time.process_time() - start < 5
