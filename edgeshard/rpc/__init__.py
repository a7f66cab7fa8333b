"""Channels, servers and their security: everything about gRPC that is not about one service."""
