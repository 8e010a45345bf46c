"""Prepares texts as training data: checks them, tokenises them into shards, and caches the shards."""
