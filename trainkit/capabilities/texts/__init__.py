"""Texts as training data: they are checked, tokenised into shards, and kept in a cache."""
