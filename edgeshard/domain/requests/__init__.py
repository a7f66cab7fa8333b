"""Requests: what is asked of a model, what comes back, and the steps between."""
