"""What is computed, and what lies on the device."""
