"""Commands that start, join and maintain the processes of a site."""
