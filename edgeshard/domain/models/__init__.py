"""Parts of a model, their formats, and the parts that a node keeps."""
