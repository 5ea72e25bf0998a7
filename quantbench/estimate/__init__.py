"""What a run would cost: counted from shapes, before it runs and where it cannot."""
