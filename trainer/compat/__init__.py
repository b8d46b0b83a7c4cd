"""Lightning's names, and what became of them here."""
