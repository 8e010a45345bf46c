"""Turn text into token shards and read them for the trainer, without importing torch."""
