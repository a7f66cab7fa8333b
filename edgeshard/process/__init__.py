"""What every process has: settings, logs and the machine's clock."""
