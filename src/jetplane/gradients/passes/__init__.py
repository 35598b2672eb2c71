"""The passes: the program run again, with noise that enters and gradients that are collected."""
