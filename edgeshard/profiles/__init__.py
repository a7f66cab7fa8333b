"""Measurements of nodes and links: the points to measure, the curves through them, and both as a
report. Pure."""
