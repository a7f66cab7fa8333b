"""Benchmarks. Each is a module that prints one JSON object: `python -m bench.hop`."""

from edgeshard.rpc.environment import settle_grpc

settle_grpc()  # as in the daemons and edgectl
