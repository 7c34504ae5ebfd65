"""Commands: they parse, call, and print; no logic of their own."""
