"""The benchmark log: the options of a run, its measurements, and the line that records both."""
