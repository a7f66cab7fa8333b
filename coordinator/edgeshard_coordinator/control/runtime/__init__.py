"""The loop that owns the state, and the executor of its actions."""
