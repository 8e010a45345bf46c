"""The screens of `trainkit watch`, which show runs live in a terminal, or print their state once."""
