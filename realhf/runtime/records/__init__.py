"""The writers of metrics, events, answers and pictures of a run, and the directory that holds them."""
