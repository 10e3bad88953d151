"""Drafting methods, one a file, and the parts that they share."""
