"""Placements and loads chosen together, for each objective, with bounds on what they miss."""
