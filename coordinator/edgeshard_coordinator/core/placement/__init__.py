"""Which node gets which layers."""
