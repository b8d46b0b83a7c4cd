"""`trainer tune`: find a learning rate, a batch size, or faster settings for a configuration."""
