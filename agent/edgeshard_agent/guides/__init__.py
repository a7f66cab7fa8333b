"""Tokens that guided answers may have next: matchers of llguidance, in a process of their own."""
