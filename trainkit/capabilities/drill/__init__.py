"""Fire drill: interrupts short runs on purpose and compares their losses to an uninterrupted run."""
