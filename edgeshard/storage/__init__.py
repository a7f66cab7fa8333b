"""Files of models: Hugging Face directories and directories of content-addressed blobs."""
