"""Placements for one load: instances, and solvers that find the best placement. Pure. `solve.py`
chooses the solver."""
