"""Keeps recorded files short: JSON with filled lines, and a text as the changes of another text."""

import json
from collections.abc import Iterator, Mapping

WIDTH = 130


def filled_json(value: object, indent: int = 0) -> str:
    """Return JSON where an object or a list takes one line if it fits, and otherwise a line per item."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or len(line) + indent <= WIDTH:
        return line
    pad = " " * (indent + 1)
    if isinstance(value, list):
        items = list(_filled_lines([filled_json(item, indent + 1) for item in value], indent + 1))
        return f"[\n{pad}" + f"\n{pad}".join(items) + f"\n{' ' * indent}]"
    items = [
        f"{json.dumps(key, ensure_ascii=False)}: {filled_json(item, indent + 1)}"
        for key, item in value.items()
    ]
    return f"{{\n{pad}" + f"\n{pad}".join(_filled_lines(items, indent + 1)) + f"\n{' ' * indent}}}"


def _filled_lines(items: list[str], indent: int) -> Iterator[str]:
    """Yield the items with commas, with as many short ones on a line as fit."""
    line = ""
    for number, item in enumerate(items, 1):
        text = item if number == len(items) else f"{item},"
        if line and ("\n" in line + text or indent + len(line) + 1 + len(text) > WIDTH):
            yield line
            line = text
        else:
            line = f"{line} {text}" if line else text
    yield line


def changed_text(base: str, changes: Mapping[str, str]) -> str:
    """Return a text with changes: ``START:END`` of replaced lines, and the new lines."""
    lines = base.splitlines(keepends=True)
    for place, text in reversed(changes.items()):
        begin, end = map(int, place.split(":"))
        lines[begin:end] = [text]
    return "".join(lines)
