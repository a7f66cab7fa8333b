"""Tokens becoming the text of an HTTP answer."""
