"""Training the demo models, and measuring a mixture's experts: run by hand, once for a model."""
