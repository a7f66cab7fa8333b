"""Plans played as events: requests that arrive, stages that compute, hops that carry."""
