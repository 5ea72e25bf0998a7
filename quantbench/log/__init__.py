"""The benchmark log: what a run was asked to do, what it measured, and the line that keeps both."""
