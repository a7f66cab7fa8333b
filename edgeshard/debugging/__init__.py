"""A daemon's memory for debugging: values as JSON and back, the ring of events, the document.
Pure."""
