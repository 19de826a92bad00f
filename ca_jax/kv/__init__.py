"""The way of KV between device and store."""
