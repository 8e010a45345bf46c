"""What not every run needs, a folder each: the core names their modules."""
