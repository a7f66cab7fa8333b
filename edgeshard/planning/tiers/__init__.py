"""Boxes that stream a part of their weights from disk in every step: costs, the joint choice, words. Pure."""
