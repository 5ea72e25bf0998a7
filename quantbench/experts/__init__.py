"""Mixtures of experts in two tiers of memory: placement, cache, copies, report."""
