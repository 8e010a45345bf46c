"""The classes of `trainkit.backend`, a module or folder for each place where runs execute."""
