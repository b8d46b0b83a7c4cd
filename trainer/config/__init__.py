"""Turn configuration files and command-line options into objects."""
