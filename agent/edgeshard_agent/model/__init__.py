"""The modules of one stage, its KV pool, its sampling: with the engine and the probe, the only
users of torch."""
