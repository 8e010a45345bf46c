"""The task ``multimodal_lm``, and the rows that it reads."""
