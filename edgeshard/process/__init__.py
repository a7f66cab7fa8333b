"""Parts of every process: settings, logs, the machine's clock, its messages to systemd and its
installation."""
