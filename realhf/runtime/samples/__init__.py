"""The samples that a rank holds, and their way from one call to the next."""
