"""Load tests: the exporter under many scrapers, the views of a long run, and servers under many clients."""
