"""Fire drill: interrupts short runs on purpose and compares their losses with an uninterrupted run."""
