"""Interrupts short runs on purpose, and compares their losses with those of an uninterrupted run."""
