"""Interrupts short runs on purpose, and compares their losses with an uninterrupted run's."""
