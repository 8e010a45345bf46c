"""Benches: a config run in many ways for a few steps each, and what each of them cost."""
