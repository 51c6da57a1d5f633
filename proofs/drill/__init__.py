"""Fault drill: injects faults into real runs and checks that each is detected and the run resumes."""
