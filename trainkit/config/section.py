"""Defines the base class of all config sections, and types and fields that they share."""

import os
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field

AtLeastOne = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
T = TypeVar("T")
DISABLE_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


class Section(BaseModel):
    """An immutable section that rejects unknown keys, non-finite numbers and values of the wrong type."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        # Build each model on first use, because RunConfig builds its sections anyway and building twice slows
        # down `submit`.
        defer_build=True,
    )

    @classmethod
    def model_rebuild(cls, **options: Any) -> bool | None:
        """Build the model without pydantic plugins.

        To find plugins, pydantic reads the metadata of every installed package, which takes a tenth of a dry
        run's time. The search for plugins can only be turned off with an environment variable. The job must
        not inherit this environment variable, so the variable is set only while the model is built.
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
    """Return a field for a section whose keys all have defaults.

    The field's default is an empty mapping, which pydantic validates. An instance as the default would build
    the section's model on import and slow down the start of every command.
    """
    return Field(default={}, validate_default=True, description=description)


def key(default: T, description: str, *, allowed: str | None = None, **constraints: Any) -> T:
    """Return a field with a default and the description that the docs show.

    `allowed` describes the accepted values in words. A tuple as the default is written as a YAML list.
    """
    if allowed is not None:
        constraints["json_schema_extra"] = {"allowed": allowed}
    if isinstance(default, tuple):
        constraints["strict"] = False
    return cast(T, Field(default=default, description=description, **constraints))
