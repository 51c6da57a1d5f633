"""Developer tools outside the installed package: benchmarks, times of the gate, generated docs."""
