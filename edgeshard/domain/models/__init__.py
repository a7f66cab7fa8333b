"""What a model is made of, in which formats, and what of it a node keeps."""
