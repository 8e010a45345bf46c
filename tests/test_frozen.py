"""Frozen dataclasses are what the standard library makes of the same class, but for what they cost."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import time
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

import pytest

from trainkit import frozen


def _make(decorator: Callable[..., Callable[[type], type]]) -> Any:
    class Point:
        """A class as any module has them."""

        name: str
        at: int = 3
        secret: str = field(default="s", repr=False)
        tags: dict[str, int] = field(default_factory=dict)

        @property
        def double(self) -> int:
            return 2 * self.at

    return decorator(frozen=True)(Point)


Ours, Theirs = _make(frozen.dataclass), _make(dataclasses.dataclass)


@frozen.dataclass(frozen=True)
class Plain:
    """One that a pickle can name."""

    number: int
    words: tuple[str, ...] = ()


@frozen.dataclass(frozen=True)
class Counted:
    """One with something of the class's own."""

    known: ClassVar[dict[str, int]] = {}
    number: int


@frozen.dataclass(frozen=True)
class More(Plain):
    """One with the fields of another."""

    extra: float = 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda cls: cls("a"),
        lambda cls: cls("a", 4),
        lambda cls: cls(at=4, name="a"),
        lambda cls: cls("a", 4, "t", {"b": 1}),
        lambda cls: dataclasses.replace(cls("a", 4, "t"), at=5),
    ],
)
def test_what_is_made_is_the_same(make: Callable[[Any], Any]) -> None:
    ours, theirs = make(Ours), make(Theirs)
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
    assert dataclasses.astuple(ours) == dataclasses.astuple(theirs)
    assert repr(ours) == repr(theirs)
    assert ours.double == theirs.double
    assert ours == make(Ours)
    assert ours != theirs
    assert ours != Ours("other", 9)
    assert Ours.__match_args__ == Theirs.__match_args__


@pytest.mark.parametrize(
    "make",
    [
        lambda cls: cls(),
        lambda cls: cls("a", 1, "t", {}, 5),
        lambda cls: cls("a", name="b"),
        lambda cls: cls("a", size=3),
        lambda cls: cls(at=3),
        lambda cls: cls(nam="a"),
    ],
)
def test_what_cannot_be_made_is_refused_by_both(make: Callable[[Any], Any]) -> None:
    for cls in (Ours, Theirs):
        with pytest.raises(TypeError):
            make(cls)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"Point\.at"):
        Ours("a").at = 1
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"Point\.at"):
        del Ours("a").at
    assert Ours("a").tags is not Ours("a").tags


def test_it_can_be_a_key_copied_and_pickled() -> None:
    value = Plain(1, ("a",))
    assert {value: 1}[Plain(1, ("a",))] == 1
    assert hash(value) == hash(Plain(1, ("a",)))
    assert copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value
    with pytest.raises(TypeError):
        hash(Ours("a"))  # as of the standard library's: it holds a dict


def test_a_class_may_add_fields_to_another() -> None:
    assert repr(More(1, ("a",), 2.0)) == "More(number=1, words=('a',), extra=2.0)"
    assert More(1) != Plain(1)


def test_what_it_does_not_offer_is_refused() -> None:
    with pytest.raises(TypeError, match="can be changed"):
        frozen.dataclass(frozen=False)
    wishes: tuple[dict[str, Any], ...] = ({"compare": False}, {"init": False}, {"kw_only": True})
    for more in wishes:
        body = {"number": field(default=1, **more), "__annotations__": {"number": int}}
        with pytest.raises(TypeError, match=r"Wish\.number asks for more"):
            frozen.dataclass(frozen=True)(type("Wish", (), body))
    own = {"number": 1, "__annotations__": {"number": int}, "__eq__": lambda self, other: True}
    with pytest.raises(TypeError, match=r"Wish has a __(eq|hash)__ of its own"):
        frozen.dataclass(frozen=True)(type("Wish", (), own))
    with pytest.raises(TypeError, match=r"Wish\.second has no default"):
        frozen.dataclass(frozen=True)(
            type("Wish", (), {"first": 1, "__annotations__": {"first": int, "second": int}})
        )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Plain(), "Plain() lacks number"),
        (lambda: Plain(1, wrods=()), "Plain() does not know wrods"),
        (lambda: Plain(1, number=2), "Plain() was given number twice"),
        (lambda: Plain(1, (), 3), "Plain() takes 2, not 3"),
    ],
)
def test_what_was_wrong_with_a_call_is_named(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError) as caught:
        make()
    assert str(caught.value) == words


def test_what_belongs_to_the_class_is_no_field() -> None:
    assert Counted(1) == Counted(1)
    assert hash(Counted(1)) == hash(Counted(1))
    assert [item.name for item in dataclasses.fields(Counted)] == ["number"]


def test_it_costs_less_than_half() -> None:
    def cost_s(decorator: Callable[..., Any]) -> float:
        began = time.process_time()
        for _ in range(50):
            _make(decorator)
        return time.process_time() - began

    assert min(cost_s(frozen.dataclass) for _ in range(5)) < 0.5 * min(
        cost_s(dataclasses.dataclass) for _ in range(5)
    )
