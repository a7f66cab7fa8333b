"""The layers of each node."""
