"""The transformer and its checkpoint: pure mathematics, knows no ranks."""
