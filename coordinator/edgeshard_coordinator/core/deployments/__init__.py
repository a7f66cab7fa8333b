"""The life of a deployment: its phases, its losses and its standbys."""
