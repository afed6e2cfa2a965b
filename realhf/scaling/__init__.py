"""Scaling curves: reads scores by compute, fits laws to them, extrapolates and compares. Free of torch."""
