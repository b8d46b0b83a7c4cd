"""`trainer estimate`: the memory that a training needs."""
