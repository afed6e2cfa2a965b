"""The control flow of a step, which every rank executes alike: parts, lag, pools and agreements."""
