"""Plans in words, beside what else there would be."""
