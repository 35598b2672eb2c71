"""The noise: its signs, its shape, and what is known of it before it is carried."""
