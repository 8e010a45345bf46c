"""Optional features, one folder for each; the core imports none of them by name."""
