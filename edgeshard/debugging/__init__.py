"""What a daemon remembers for whoever debugs it: values as JSON and back, the ring of events, the document. Pure."""
