"""What every section of a config has in common."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

AtLeastOne = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
_FINDS_PLUGINS = "pydantic.plugin._loader"
_NO_PLUGINS = ModuleType(_FINDS_PLUGINS)
_NO_PLUGINS.__dict__["get_plugins"] = lambda: ()


class Section(BaseModel):
    """Frozen; refuses keys it does not know, numbers that are not finite, and values of another type."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        # Built when first used: the whole config builds its sections anyway, and `submit` has to wait for it.
        defer_build=True,
    )

    @classmethod
    def model_rebuild(cls, **options: Any) -> bool | None:
        """Build the model as pydantic does, without the plugins of pydantic that happen to be installed.

        To find them it reads a file of every package there is, and what it finds is loaded into the command.
        Its setting for that, PYDANTIC_DISABLE_PLUGINS, is looked at only after the reader of packages was
        loaded, with a parser of mails and one of zip files, which takes as long as the building.
        """
        before = sys.modules.get(_FINDS_PLUGINS)
        sys.modules[_FINDS_PLUGINS] = _NO_PLUGINS
        try:
            return super().model_rebuild(**options)
        finally:
            sys.modules.pop(_FINDS_PLUGINS, None)
            if before not in (None, _NO_PLUGINS):
                sys.modules[_FINDS_PLUGINS] = before


def section(description: str) -> Any:
    """A field that holds a section, all of whose keys have defaults.

    Its default is read as an empty section is. An instance would need a model built for the section alone,
    and the start of every command would wait for that.
    """
    return Field(default={}, validate_default=True, description=description)


def list_field(default: tuple[Any, ...], description: str, **constraints: Any) -> Any:
    """A field that holds a tuple and is written as a YAML list."""
    return Field(default=default, description=description, strict=False, **constraints)
