"""`trainkit diagnose`: names the first failed rank, the root cause with evidence, and what to do about it."""
