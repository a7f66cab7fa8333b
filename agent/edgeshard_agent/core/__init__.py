"""The stages that this node should hold, and the stages that it holds: events in, actions out.
Pure."""
