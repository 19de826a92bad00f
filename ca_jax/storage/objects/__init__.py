"""The tier that replicas share: objects at a URL, and one manifest a session that says whose it is."""
