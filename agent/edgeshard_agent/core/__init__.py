"""What this node should hold and what it holds: events in, actions out. Pure."""
