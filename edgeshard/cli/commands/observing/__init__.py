"""Commands that show a site's activity and its faults."""
