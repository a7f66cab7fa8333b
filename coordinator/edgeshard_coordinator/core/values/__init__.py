"""What the coordinator knows, what happens to it and what it wants done, as values."""
