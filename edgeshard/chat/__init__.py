"""Conversations: chat templates, what they make prompts of, and what is in a model's answer."""
