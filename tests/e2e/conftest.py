"""What needs a browser is left out where there is none; `tests/conftest.py` says so."""

from tests.browser import chromium

collect_ignore = [] if chromium.find() else ["test_dashboard.py"]
