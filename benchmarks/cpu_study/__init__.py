"""How well a fitted profile predicts steps that the fit did not see, on a CPU machine with gloo."""
