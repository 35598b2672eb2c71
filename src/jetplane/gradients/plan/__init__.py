"""The plan of a program: where noise enters, and through what it is pulled back to the layers."""
