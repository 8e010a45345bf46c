"""The state of any object as JSON, with its tensors apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainkit.errors import EXIT_NO_RESTART, TrainkitError


def encode(path: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """A state as JSON, in which a tensor is its path; the tensors are added to `tensors`.

    Raises TrainkitError for what JSON cannot represent.
    """
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"items": [[key, encode(f"{path}.{key}", item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [encode(f"{path}.{index}", item, tensors) for index, item in enumerate(value)]
        return {type(value).__name__ if type(value) in (list, tuple) else "list": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TrainkitError(
        f"{path} cannot be saved: it is a {type(value).__name__}",
        hint="let every tracked state_dict consist of tensors, numbers, strings, lists and dictionaries",
        exit_code=EXIT_NO_RESTART,
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `encode` wrote."""
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "items":
        return {key: decode(item, tensors) for key, item in content}
    items = [decode(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
