"""One file for each model family; the registry finds them."""
