"""Which sessions are on SSD and in which blocks, durably."""
