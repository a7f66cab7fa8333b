"""The daemon of a box: it profiles itself, hosts stages and moves activations."""
