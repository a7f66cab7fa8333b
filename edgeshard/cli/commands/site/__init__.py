"""Commands that start, join and look after the processes of a site."""
