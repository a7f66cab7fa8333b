"""The coordinator's decisions as pure functions: events in, actions out. No clock, no randomness,
no I/O."""
