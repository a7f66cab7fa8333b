"""Emulation of another device and other links."""
