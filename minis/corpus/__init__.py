"""Training text: generated dialogues and stories (ours), and readers of natural text that is never stored here."""
