"""What every process has: settings, logs, the machine's clock, what it tells systemd and how it is installed."""
