"""Membership of the site: tokens, certificates, and denials of these."""
