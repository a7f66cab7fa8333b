"""Nodes that register, say how they are, fall silent and go away."""
