"""Comparison: arms run side by side, and what may be said about the difference."""

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as generate.py does, before torch is there
