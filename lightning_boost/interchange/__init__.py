"""Models in files, in this package's own format and in those of others; nothing else here knows foreign names."""
