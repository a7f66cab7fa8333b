"""Hands EdgeShard itself to machines that have none yet: folders of wheels, to whoever has a token of the site."""
