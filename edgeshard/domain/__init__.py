"""The values every process shares. Frozen and pure: no clock, chance, network or files."""
