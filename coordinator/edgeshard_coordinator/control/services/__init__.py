"""The gRPC services, the gateway's way in, and metrics."""
