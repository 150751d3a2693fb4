"""Personalized federated learning: every client gets the best model it can have."""

__version__ = "0.1.0"
