"""Measuring a box: its layers' times, its memory, the engine's own cost of a step, and its links."""
