"""The callers that may send a request, and the limits of its body."""
