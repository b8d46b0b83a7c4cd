"""`trainer tune`: find a learning rate or a batch size for a configuration."""
