"""Memory and disks that hold blocks, and the moves of blocks between them."""
