"""What the config can say and this release cannot do yet: one row a key, deleted when it can."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.config.schema import RunConfig

# key, the only value that is honoured, what it would be
_ROWS: tuple[tuple[str, object, str], ...] = (
    ("task", "causal_lm", "a task other than causal_lm"),
    ("model.hf", None, "training Hugging Face models"),
    ("model.init_from", None, "starting from the weights of another run"),
    ("optimizer.name", "adamw", "an optimizer other than adamw"),
    ("logging.mlflow", None, "logging to MLflow"),
    ("logging.wandb", None, "logging to Weights & Biases"),
)


def unsupported(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The keys that ask for more than this release can do, with a message each."""
    for key, only, feature in _ROWS:
        value: object = config
        for part in key.split("."):
            value = getattr(value, part)
        if value != only:
            yield key, f"{feature} is not in this release; {key} must be {_shown(only)}"


def _shown(value: object) -> str:
    """A value as YAML has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else "[]" if value == () else str(value)
