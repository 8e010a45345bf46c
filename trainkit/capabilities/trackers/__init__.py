"""MLflow and Weights & Biases: a reader of the run folder that sends what `metrics.jsonl` has."""
