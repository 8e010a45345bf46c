"""Text to token shards, and token shards to the trainer. Nothing in here imports torch."""
