"""What the program is: how it is called and watched, and where the samples of its values lie."""
