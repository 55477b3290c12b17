"""`tidectl eval`: what residency, fidelity and edits cost in quality, on texts whose tokens are known."""
