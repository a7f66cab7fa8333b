"""Commands that show what a site does, and what is wrong with it."""
