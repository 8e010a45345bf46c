"""Ranks that another launcher has started."""
