"""What a plan is made from: nodes and links, measured or of a data sheet, the model's shapes, and what is asked."""
