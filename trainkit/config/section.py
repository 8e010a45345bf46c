"""Defines the base class of all config sections, and the types and fields they share."""

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
        # Build each model on first use: RunConfig builds its sections anyway, and building them twice would
        # slow down `submit`.
        defer_build=True,
    )

    @classmethod
    def model_rebuild(cls, **options: Any) -> bool | None:
        """Build the model with pydantic's plugins disabled.

        To find plugins, pydantic reads the metadata of every installed package, which would account for a
        tenth of the time of a dry run. Plugin discovery can be disabled only with an environment variable.
        The variable is set only while the model is built, so that the job does not inherit it.
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
    """Return a field for a section whose keys all have default values.

    The field's default value is an empty mapping, which pydantic validates into a section. If the default
    were an instance, the section's model would be built on import, which would slow down every command.
    """
    return Field(default={}, validate_default=True, description=description)


def key(default: T, description: str, *, allowed: str | None = None, **constraints: Any) -> T:
    """Return a field with a default value and the description shown in the docs.

    `allowed` describes the accepted values in words. A tuple given as the default is converted to a YAML
    list.
    """
    if allowed is not None:
        constraints["json_schema_extra"] = {"allowed": allowed}
    if isinstance(default, tuple):
        constraints["strict"] = False
    return cast(T, Field(default=default, description=description, **constraints))
