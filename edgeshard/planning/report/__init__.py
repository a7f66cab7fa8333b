"""Plans in words, beside other ways to place a model."""
