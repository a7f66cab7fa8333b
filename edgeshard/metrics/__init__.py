"""A daemon's figures in the form that Prometheus reads, and the listener that serves them."""
