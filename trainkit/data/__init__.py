"""Turns text into token shards and reads them for the trainer. Never imports torch."""
