"""What measurements say: the points that are measured, the curves through them, and both as a report. Pure."""
