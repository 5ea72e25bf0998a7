"""Comparison: arms run side by side, and what may be said about the difference."""
