"""Frozen dataclasses that cost little to define, for a command defines many of them and lives for a moment.

`dataclasses.dataclass` writes and compiles six methods for every class; that was an eighth of the time that
`trainkit submit` takes. Here all classes share their methods. To who uses them, and to a type checker, they
are dataclasses: `fields`, `replace`, `asdict` and ``match`` work.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

_MISSING = dataclasses.MISSING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen: bool) -> Callable[[type], type]:
        """What ``@dataclasses.dataclass(frozen=True)`` makes, with shared methods.

        Every field is an argument of the constructor and counts in a comparison. TypeError for another wish.
        """
        if not frozen:
            raise TypeError("a class that can be changed is a plain dataclasses.dataclass")
        return _freeze


def _freeze(cls: type) -> type:
    cls = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    fields = dataclasses.fields(cls)
    _refuse_more(cls, fields)
    methods = {
        "__init__": _constructor(cls, fields),
        "__eq__": _equal,
        "__hash__": _hash,
        "__setattr__": _refuse_change,
        "__delattr__": _refuse_change,
    }
    for name, method in {"__repr__": _repr, **methods}.items():
        if name not in vars(cls):
            setattr(cls, name, method)
        elif name in methods:
            raise TypeError(f"{cls.__qualname__} has a {name} of its own")
    return cls


def _refuse_more(cls: type, fields: tuple[dataclasses.Field[Any], ...]) -> None:
    """TypeError for what a frozen class cannot have here."""
    had_default = False
    for field in fields:
        has_default = field.default is not _MISSING or field.default_factory is not _MISSING
        if had_default and not has_default:
            raise TypeError(f"{cls.__qualname__}.{field.name} has no default, and comes after one that has")
        if not field.init or not field.compare or field.hash is not None or field.kw_only:
            raise TypeError(f"{cls.__qualname__}.{field.name} asks for more than a default and repr")
        had_default = has_default


def _constructor(cls: type, fields: tuple[dataclasses.Field[Any], ...]) -> Callable[..., None]:
    names = tuple(field.name for field in fields)
    defaults = {field.name: field.default for field in fields if field.default is not _MISSING}
    factories = [
        (field.name, field.default_factory) for field in fields if field.default_factory is not _MISSING
    ]
    known = frozenset(names)
    finish = getattr(cls, "__post_init__", None)

    def __init__(self: Any, *args: Any, **values: Any) -> None:
        state = self.__dict__  # past __setattr__, which refuses
        state.update(defaults)
        state.update(values)
        if args:
            state.update(zip(names, args, strict=False))
        for name, make in factories:
            if name not in state:
                state[name] = make()
        twice = values.keys() & names[: len(args)]
        if twice or state.keys() != known or len(args) > len(names):
            raise TypeError(f"{cls.__qualname__}() {_trouble(names, len(args), state.keys(), twice)}")
        if finish is not None:
            finish(self)

    return __init__


def _trouble(names: tuple[str, ...], num_args: int, given: Collection[str], twice: Collection[str]) -> str:
    """Why a class cannot be made so, by the names of its fields."""
    missing = [name for name in names if name not in given]
    unknown = [name for name in given if name not in names]
    if missing:
        return f"lacks {', '.join(missing)}"
    if unknown:
        return f"does not know {', '.join(unknown)}"
    return f"was given {', '.join(sorted(twice))} twice" if twice else f"takes {len(names)}, not {num_args}"


def _repr(self: Any) -> str:
    shown = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _content(self: Any) -> tuple[Any, ...]:
    return tuple([getattr(self, name) for name in self.__match_args__])


def _equal(self: Any, other: object) -> Any:
    return _content(self) == _content(other) if type(self) is type(other) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_content(self))


def _refuse_change(self: Any, name: str, value: object = None) -> None:
    raise dataclasses.FrozenInstanceError(f"{type(self).__qualname__}.{name} cannot be changed")
