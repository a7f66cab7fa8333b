"""The gateway's connections: listening, counting, and making room."""
