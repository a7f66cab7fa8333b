"""Disk storage other than models: the state, operations and the audit log."""
