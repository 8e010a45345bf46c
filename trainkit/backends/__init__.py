"""The backends that implement `trainkit.backend`: one module or folder for each place where runs execute."""
