"""The accelerator's benchmark: what the hardware gives, and how much of it the engine reaches."""
