"""Jobs for the machine's service manager: launchd or systemd."""
