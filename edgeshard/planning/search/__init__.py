"""Placements and loads chosen together, for each objective, with bounds of the best."""
