"""The weights a node holds on disk: a content-addressed cache, and the fetching of missing ones
from the coordinator.
"""
