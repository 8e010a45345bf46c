"""Prepares texts as training data: checks and tokenizes them, and caches the resulting shards."""
