"""The coordinator's hands: the state loop, the disk, the streams of boxes and heads, and the services."""
