"""Prepare texts as training data: check them, tokenise them into shards, and cache the shards."""
