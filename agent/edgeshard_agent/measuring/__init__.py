"""Measuring a node: its layers' times, its memory, the engine's own cost of a step, and its
links."""
