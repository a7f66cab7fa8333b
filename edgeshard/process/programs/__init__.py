"""What every installed program does before and after its own work."""
