"""The implementations of `trainkit.backend`: one module or folder for each place where runs execute."""
