"""Distributes EdgeShard itself to machines that have none yet: folders of wheels, for holders of a
token of the site."""
