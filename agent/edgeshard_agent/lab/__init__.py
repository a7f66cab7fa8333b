"""Pretending to be another device behind other links."""
