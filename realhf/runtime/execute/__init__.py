"""Executes the actions of a step on a rank, and measures its memory and compute."""
