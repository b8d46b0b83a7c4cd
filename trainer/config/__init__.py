"""Configuration files and command-line values to objects."""
