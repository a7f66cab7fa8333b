"""Forecasts of the experts that are needed, and choices of those that may go: decisions about a mixture's experts on
storage. Pure."""
