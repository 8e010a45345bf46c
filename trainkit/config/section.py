"""What every section of a config has in common."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

AtLeastOne = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
DISABLE_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


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
        """Build the model without the plugins of pydantic that other packages install.

        The one trick for the start of a command: pydantic reads the metadata of every installed package to
        find plugins, which takes longer than all models of a config. Its own switch for that is a variable,
        which must not reach the job: it is set only while a model of trainkit is built.
        """
        before = os.environ.get(DISABLE_PLUGINS)
        os.environ[DISABLE_PLUGINS] = "__all__"
        try:
            return super().model_rebuild(**options)
        finally:
            if before is None:
                del os.environ[DISABLE_PLUGINS]
            else:
                os.environ[DISABLE_PLUGINS] = before


def section(description: str) -> Any:
    """A field that holds a section, all of whose keys have defaults.

    Its default is read as an empty section is. An instance would need a model built for the section alone,
    and the start of every command would wait for that.
    """
    return Field(default={}, validate_default=True, description=description)


def list_field(default: tuple[Any, ...], description: str, **constraints: Any) -> Any:
    """A field that holds a tuple and is written as a YAML list."""
    return Field(default=default, description=description, strict=False, **constraints)
