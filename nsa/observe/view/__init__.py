"""What a run looks like: series of its figures, where its time went, the terminal view, the report, comparisons."""
