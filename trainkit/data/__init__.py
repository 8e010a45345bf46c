"""Convert text to token shards, and read token shards for the trainer, without importing torch."""
