"""What happens around a step, one reason each.

Order after the optimizer: heartbeat (priority 10), save (1), evaluation, then wishes from outside (-10), which may end
the run. The engine's own bookkeeping comes last.
"""
