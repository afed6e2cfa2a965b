"""Doubts about what is legal but often a mistake, by subject; `rules` lists all of them. Free of torch."""
