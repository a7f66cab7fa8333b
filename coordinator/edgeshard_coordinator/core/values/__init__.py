"""The coordinator's state, events and actions, as values."""
