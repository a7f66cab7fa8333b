"""Having nodes measure themselves and their links."""
