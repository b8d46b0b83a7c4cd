"""Stop all processes together, notice hangs and dead processes, and report them."""
