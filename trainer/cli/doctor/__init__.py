"""`trainer doctor`: check the machine."""
