"""trainkit takes one YAML config from a laptop to a thousand GPUs, and resumes after every interruption."""

__version__ = "0.1.0"
DISTRIBUTION = "trainkit-hpc"
"""The name that pip uses. The distribution called `trainkit` on PyPI is another project."""

# For type checkers, __init__.pyi states which module each name comes from.
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
    """Import a name of the Python API on first use."""
    from importlib import import_module

    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(module), name)
            return value
    raise AttributeError(f"module 'trainkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
