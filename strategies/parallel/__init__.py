"""Split one model over processes: layers, sequences, stages and experts; and verify that it computes the same."""
