"""Costs of a placement: seconds, bytes and joules of its stages and hops, and the resource that is
short."""
