"""Benches: a config run on many layouts for a few steps each, and what each costs."""
