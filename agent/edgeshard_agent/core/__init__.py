"""The stages that this node should hold, and those that it holds: events in, actions out. Pure."""
