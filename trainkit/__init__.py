"""trainkit: one YAML config from a laptop to a thousand GPUs, and back after every interruption."""

__version__ = "0.1.0"
