"""The coordinator: which nodes there are, which of them holds what, and the way in for requests."""
