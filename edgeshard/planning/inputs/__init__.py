"""The planner's inputs: nodes and links, measured or of a data sheet, the model's shapes, and the
requests."""
