"""What a daemon counts, in the form that Prometheus reads, and the listener that it is read from."""
