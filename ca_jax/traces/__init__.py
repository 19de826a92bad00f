"""Readers of recorded conversations: what the demo, the benches and the simulator replay.

Not here: tokenising, timing, serving. A reader yields text and knows nothing of models.
"""
