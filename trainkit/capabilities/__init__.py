"""What not every run needs, a folder each, which the core does not import."""
