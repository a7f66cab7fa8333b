"""Placements for one load: what an instance is, and how the best one is found. Pure. `solve.py` chooses the solver."""
