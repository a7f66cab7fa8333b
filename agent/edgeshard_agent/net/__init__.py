"""The node's connections: neighbours, the coordinator's control stream, the head's request
stream."""
