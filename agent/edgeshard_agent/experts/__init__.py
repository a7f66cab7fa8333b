"""Forecasts of the experts that are needed, and choices of experts that may go: decisions about a mixture's experts on
storage. Pure."""
