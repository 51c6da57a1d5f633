"""Drill scenarios, one function per fault: inject it, and record what was detected, left behind and resumed."""
