"""Stages from a command to running, and down again."""
