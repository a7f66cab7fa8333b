"""What is kept on disk beside models: the state, operations and the audit log."""
