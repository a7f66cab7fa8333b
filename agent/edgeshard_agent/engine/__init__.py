"""Running a stage, and, on the first one, forming the pipeline's steps."""
