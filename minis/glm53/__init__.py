"""The trainer of the GLM-5.3 mini."""
