"""The coordinator's hands: the state loop, the disk, the streams of nodes and heads, and the
services."""
