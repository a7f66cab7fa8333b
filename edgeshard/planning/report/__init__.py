"""Plans in words and pictures, beside what else there would be."""
