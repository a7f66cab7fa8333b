"""Weights: from files into a stage's modules, and streamed where memory is short."""
