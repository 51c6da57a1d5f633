"""The `nsa` command: arguments in, one call out. The only package that prints."""
