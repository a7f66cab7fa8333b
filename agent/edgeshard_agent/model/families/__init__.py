"""Module classes of families that need more than the generic stages. A record names its file, which
has `MODULES`."""
