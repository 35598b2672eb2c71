"""Many processes that take one step: what they say to each other, and how they stay the same."""
