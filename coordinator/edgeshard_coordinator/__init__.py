"""The coordinator: which boxes there are, which of them holds what, and the way in for requests."""
