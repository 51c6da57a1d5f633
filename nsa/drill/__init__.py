"""The fault drill: real runs, real faults, and a table of what the safety net of this installation did about each."""
