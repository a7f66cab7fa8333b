"""Nodes: what they are, how they are, and what was measured of them."""
