"""Commands that ask a model for text."""
