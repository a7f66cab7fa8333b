"""The weights a node holds on disk: a content-addressed cache, and fetching what it lacks from the coordinator."""
