"""Prepares texts as training data: checks and tokenises them, and caches the resulting shards."""
