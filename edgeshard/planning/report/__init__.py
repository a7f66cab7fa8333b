"""Plans in words and pictures, beside other ways to place a model."""
