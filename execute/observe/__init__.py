"""What a step did: every storage, with its category and lifetime, and every collective."""
