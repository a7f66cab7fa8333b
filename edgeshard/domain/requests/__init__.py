"""Requests: the input of a model, its output, and the steps between."""
