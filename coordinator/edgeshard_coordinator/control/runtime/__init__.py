"""The loop that owns the state, and what carries out its actions."""
