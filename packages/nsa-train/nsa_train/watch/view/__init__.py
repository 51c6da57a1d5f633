"""Views of a run: time series, goodput, terminal monitor, HTML report, comparison of runs."""
