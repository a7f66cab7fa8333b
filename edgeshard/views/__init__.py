"""Screens' values of a site, for edgectl and the dashboard alike: plain values of one snapshot, or of two. Pure."""
