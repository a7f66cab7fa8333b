"""What edgectl upgrade fetches: the wheels of a site, or a bundle of the web."""
