"""The dashboard: what an operator's browser sees of the site, and may do there."""
