"""Train models of the transformers library as a task: `model.hf`."""
