"""Configuration files of other training programs, and what they say of a run."""
