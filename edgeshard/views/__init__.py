"""What screens show of a site, for edgectl and the dashboard alike: plain values of one look, or of two. Pure."""
