"""Fixtures of the kernels' tests."""

from tests.ops.instructions import best, isa, same_for_any_threads, small_pieces, threads

__all__ = ["best", "isa", "same_for_any_threads", "small_pieces", "threads"]
