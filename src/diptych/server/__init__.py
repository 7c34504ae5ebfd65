"""HTTP, job store, scheduler and studio page."""
