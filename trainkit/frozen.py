"""Frozen dataclasses that cost little to define, for a command defines many of them and lives for a moment.

`dataclasses.dataclass` writes and compiles six methods for every class; that was an eighth of the time that
`trainkit submit` takes. Here all classes share their methods. To who uses them, and to a type checker, they
are dataclasses: `fields`, `replace`, `asdict` and ``match`` work.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen: bool) -> Callable[[type], type]:
        """What ``@dataclasses.dataclass(frozen=True)`` makes, with shared methods.

        Every field is an argument of the constructor and counts in a comparison. TypeError for another wish.
        """
        if not frozen:
            raise TypeError("what can be changed is a dataclass of dataclasses")
        return _freeze


def _freeze(cls: type) -> type:
    cls = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    fields = dataclasses.fields(cls)
    for field in fields:
        if not field.init or not field.compare or field.hash is not None or field.kw_only:
            raise TypeError(f"{cls.__qualname__}.{field.name} asks for more than a default and repr")
    methods = {
        "__init__": _constructor(cls, fields),
        "__repr__": _repr,
        "__eq__": _equal,
        "__hash__": _hash,
        "__setattr__": _refuse_change,
        "__delattr__": _refuse_change,
    }
    for name, method in methods.items():
        if name not in vars(cls):
            setattr(cls, name, method)
    return cls


def _constructor(cls: type, fields: tuple[dataclasses.Field[Any], ...]) -> Callable[..., None]:
    names = tuple(field.name for field in fields)
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    factories = [
        (field.name, field.default_factory)
        for field in fields
        if field.default_factory is not dataclasses.MISSING
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
        if (
            len(args) > len(names)
            or state.keys() != known
            or not values.keys().isdisjoint(names[: len(args)])
        ):
            raise TypeError(f"{cls.__qualname__}({', '.join(names)}) was called with {args} and {values}")
        if finish is not None:
            finish(self)

    return __init__


def _repr(self: Any) -> str:
    shown = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _content(self: Any) -> tuple[Any, ...]:
    return tuple([getattr(self, name) for name in self.__dataclass_fields__])


def _equal(self: Any, other: object) -> Any:
    return _content(self) == _content(other) if type(self) is type(other) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_content(self))


def _refuse_change(self: Any, name: str, value: object = None) -> None:
    raise dataclasses.FrozenInstanceError(
        f"{type(self).__qualname__}.{name} is fixed; see dataclasses.replace"
    )
