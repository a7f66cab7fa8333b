"""The daemon of a node: it profiles itself, hosts stages and moves activations."""
