"""Who may send a request, and how much of it."""
