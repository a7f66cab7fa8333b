"""Texts of plans, compared with other ways to place a model."""
