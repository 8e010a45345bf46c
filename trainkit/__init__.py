"""trainkit trains with one YAML config on a laptop or on a thousand GPUs, and resumes after interruptions."""

__version__ = "0.1.0"
DISTRIBUTION = "trainkit-hpc"
"""The name of this distribution on PyPI. The PyPI distribution called `trainkit` is a different project."""

# Type checkers do not read this mapping but __init__.pyi, which states the module of each name.
_MODULES = {
    "trainkit.api": ("Group", "Run", "RunError", "as_completed", "map_array", "runs", "submit", "sweep"),
    "trainkit.capabilities.report.curves": ("Curves", "curves"),
    "trainkit.errors": ("ConfigError", "SlurmError", "TrainkitError", "UsageError"),
    "trainkit.function": ("Requeue",),
}
__all__ = [
    "ConfigError",
    "Curves",
    "Group",
    "Requeue",
    "Run",
    "RunError",
    "SlurmError",
    "TrainkitError",
    "UsageError",
    "__version__",
    "as_completed",
    "curves",
    "map_array",
    "runs",
    "submit",
    "sweep",
]


def __getattr__(name: str) -> object:
    """Import a name of the Python API when it is first used."""
    from importlib import import_module

    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(module), name)
            return value
    raise AttributeError(f"module 'trainkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
