"""What the engine tells of itself: counters, a timeline, a way to wake it."""
