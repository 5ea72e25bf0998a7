"""Kernels in C++ for the CPU, built with the machine's own compiler when first used (build.py)."""
