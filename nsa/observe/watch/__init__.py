"""Is a run well? Tails of its records, what is known of it, a pure judgement, and the processes that act on it."""
