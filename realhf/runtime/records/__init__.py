"""What a run writes and shows: metrics, events, answers, pictures, and the directory that holds them."""
