"""Parses tables of messages: a typed line and, indented below it, the expected message."""


def messages(text: str) -> list[tuple[str, str]]:
    """Return each unindented line with its message.

    The lines of a message are joined, and its hint is a separate line.
    """
    table: list[list[str]] = []
    for line in text.strip("\n").splitlines():
        if line.startswith(" "):
            table[-1].append(line.strip())
        else:
            table.append([line])
    return [(typed, " ".join(words).replace(" hint: ", "\n  hint: ")) for typed, *words in table]
