"""Fire drill: interrupts short runs of a config on purpose and compares their losses with an uninterrupted run."""
