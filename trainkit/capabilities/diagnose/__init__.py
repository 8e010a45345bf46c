"""`trainkit diagnose`: which rank failed first, why, the lines that show it, and what to do."""
