"""Files of other tools."""
