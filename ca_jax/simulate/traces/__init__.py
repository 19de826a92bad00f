"""Readers of traces: recorded conversations (`sharegpt`) and requests to servers (`requests`).

Not here: tokenising, timing, serving. A reader yields text or lengths and knows nothing of models.
"""
