"""Without a browser, the tests that need one are not collected."""

from tests.browser import chromium

collect_ignore = [] if chromium.find() else ["test_rebinding_in_a_browser.py"]
