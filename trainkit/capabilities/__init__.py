"""What not every run needs, one folder each, which the core knows through `trainkit.capability` alone."""
