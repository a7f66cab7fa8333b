"""Benchmarks. Each is a module that prints one JSON object: `python -m bench.hop`."""
