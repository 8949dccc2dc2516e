"""Views as functions: from what is explored and a size to lines."""
