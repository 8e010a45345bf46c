"""Makes a process with this folder on PYTHONPATH believe that a driver is loaded."""

from pathlib import Path

from trainkit.cluster import machine

machine.NVIDIA_DRIVER = Path(__file__)
