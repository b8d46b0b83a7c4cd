"""`trainer config`: write a configuration file, from answers or from another program's."""
