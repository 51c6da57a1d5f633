"""One function per fault: it plays the fault out on a stage and fills in a row. Demands are those of spec section 6."""
