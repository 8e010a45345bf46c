"""Tables of messages, written as text: what is typed and, indented below it, what is said."""

from __future__ import annotations


def messages(text: str) -> list[tuple[str, str]]:
    """Each unindented line with the sentences below it, whose lines are joined, and whose hint is a line."""
    table: list[list[str]] = []
    for line in text.strip("\n").splitlines():
        if line.startswith(" "):
            table[-1].append(line.strip())
        else:
            table.append([line])
    return [(typed, " ".join(words).replace(" hint: ", "\n  hint: ")) for typed, *words in table]
