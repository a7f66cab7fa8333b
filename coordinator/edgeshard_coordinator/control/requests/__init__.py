"""The way in for requests, and the tokens back."""
