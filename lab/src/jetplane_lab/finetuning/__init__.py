"""Fine-tuning a pretrained transformer, MiniLM, with forward passes only: methods beside each other on film reviews."""
