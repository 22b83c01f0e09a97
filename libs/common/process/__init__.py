"""What every process does, whatever it serves: settings, logs, metrics, lifecycle, health, egress."""
