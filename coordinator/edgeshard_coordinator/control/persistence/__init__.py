"""The disk beside models: the state, operations and the audit log."""
