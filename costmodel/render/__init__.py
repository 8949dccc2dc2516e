"""What a person reads: a prediction and the lists of the catalogue as text."""
