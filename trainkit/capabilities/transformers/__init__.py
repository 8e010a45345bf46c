"""Trains models of the transformers library (config key `model.hf`) as a task."""
