"""Start processes on one machine or several, and start them again."""
