"""Weights: from files into a stage's modules, and streamed if memory is short."""
