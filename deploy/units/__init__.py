"""Jobs for the machine's own service manager: launchd, systemd."""
