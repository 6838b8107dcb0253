"""The web page at `/`: status, charts and a playground. It uses the public API."""
