"""Checks of what is published; `make release-check`."""
