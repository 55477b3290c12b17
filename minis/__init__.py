"""Training code and checkpoints of the small models that ship with TideLM."""
