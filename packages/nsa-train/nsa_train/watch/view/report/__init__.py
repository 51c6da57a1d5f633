"""HTML reports of one run or of several: a single self-contained file without external resources."""
