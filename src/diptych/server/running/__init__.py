"""Engines in processes of their own, and the threads that feed them from the queue."""
