"""Conversations: chat templates, the prompts they make, and the parts of a model's answer."""
