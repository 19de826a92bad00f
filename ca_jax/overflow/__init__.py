"""Which tokens leave a full context."""
