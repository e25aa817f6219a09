"""Lightning callbacks; none depends on another."""
