"""Fixed rows of tokens in one global order, whatever they come from, with a cursor free of world size."""
