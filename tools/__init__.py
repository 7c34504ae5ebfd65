"""Programs for the people who work on Diptych; nothing in the package imports them."""
