"""Makes a program of an experiment and a plan: checks, warnings, and the actions that every rank executes."""
