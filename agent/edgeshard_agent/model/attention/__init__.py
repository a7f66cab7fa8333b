"""Attention over paged keys and values, and the memory these lie in."""
