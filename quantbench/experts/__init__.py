"""Experts in two tiers of memory: how often each is chosen, which stay in fast memory, what a step
costs."""
