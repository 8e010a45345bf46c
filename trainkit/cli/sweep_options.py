"""The options of `submit` that make many runs out of one config, or let a run wait for another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trainkit.errors import UsageError
from trainkit.frozen import dataclass

if TYPE_CHECKING:
    from trainkit.cli.options import ConfigRequest
    from trainkit.config import LoadedConfig
    from trainkit.submit.array_spec import ArraySpec

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class GroupRequest:
    """Which points were asked for."""

    sweeps: tuple[str, ...]
    array: str | None

    def __bool__(self) -> bool:
        return bool(self.sweeps) or self.array is not None

    def points(self, seed: int | None) -> tuple[ArraySpec, dict[int, dict[str, Any]]]:
        """The array, and the values of every point by index.

        `seed` is that of the config, which the points of an array without values count on from; None leaves
        it. Raises UsageError.
        """
        from trainkit.plan.sweep import combinations, parse_axes
        from trainkit.submit.array_spec import ArraySpec, parse_array

        spec = None if self.array is None else parse_array(self.array)
        if not self.sweeps:
            assert spec is not None
            if not spec.indices:
                raise UsageError(
                    f"--array {self.array} says how many tasks run at once, but not which there are",
                    hint="for example --array 0-9%4",
                )
            values = {index: {} if seed is None else {"seed": seed + index} for index in spec.indices}
            return spec, values
        if spec is not None and spec.indices:
            raise UsageError(
                f"--array {self.array}: a sweep counts its points itself",
                hint="with --sweep only a limit is taken, as in --array %4",
            )
        found = combinations(parse_axes(self.sweeps))
        limit = None if spec is None else spec.limit
        return ArraySpec(tuple(range(len(found))), limit), dict(enumerate(found))

    def loader(self, request: ConfigRequest) -> Callable[[dict[str, Any]], LoadedConfig]:
        """What gives the config of a point with these values; ConfigError lists its problems."""
        from trainkit.plan.sweep import shown_value

        def swept(values: dict[str, Any]) -> LoadedConfig:
            typed = {key: (f"--sweep {key}={shown_value(value)}", value) for key, value in values.items()}
            return replace(request, flags={**request.flags, **typed}).load()

        if self.sweeps:
            return swept
        base = request.load()
        return lambda values: _with_seed(base, values.get("seed"))


def _with_seed(loaded: LoadedConfig, seed: int | None) -> LoadedConfig:
    """The config with another seed, which nobody typed: --set seed=… is what it counts on from."""
    if seed is None:
        return loaded
    from trainkit.config.changes import with_values

    return with_values(loaded, {"seed": seed}, "--array")


def group_options(function: Command) -> Command:
    """``--sweep`` and ``--array``, given together as `group: GroupRequest`."""

    @functools.wraps(function)
    def wrapper(sweeps: tuple[str, ...], array: str | None, **others: Any) -> Any:
        return function(group=GroupRequest(sweeps, array), **others)

    decorated: Any = click.option(
        "--sweep",
        "sweeps",
        multiple=True,
        metavar="KEY=V,V,…",
        help="A run for each of these values, and for each combination with other --sweep; one Slurm array.",
    )(wrapper)
    return click.option(  # type: ignore[no-any-return]
        "--array",
        metavar="SPEC",
        help="A run for each index, as in 0-9 or 1,3,5, with seeds that count on; %4 is the most at once.",
    )(decorated)


def after_option(function: Command) -> Command:
    """``--after RUN``, repeatable, given as `after`."""
    return click.option(
        "--after", multiple=True, metavar="RUN", help="Start when RUN has finished well; repeatable."
    )(function)
