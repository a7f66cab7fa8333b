"""Models that the coordinator adds itself: from folders that its settings name, and from the Hub if
that is allowed."""
