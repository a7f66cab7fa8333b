"""What a placement costs: seconds, bytes and joules of its stages and hops, and what is short."""
