"""The coordinator: it knows the site's nodes and their stages, and lets requests in."""
