"""Callbacks of the trainer, one purpose each. They use public hooks of the engine's `Callback` only.

Order after the optimizer step: heartbeat (priority 10), replica check (5), save (1), evaluation (0), stop requests
(-10), which may end the run. The engine's own bookkeeping comes last.
"""
