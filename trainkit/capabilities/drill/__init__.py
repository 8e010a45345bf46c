"""Interrupts short runs on purpose, and compares their losses with the losses of an uninterrupted run."""
