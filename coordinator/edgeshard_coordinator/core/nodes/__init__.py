"""Nodes that register, report their condition, fall silent and leave."""
