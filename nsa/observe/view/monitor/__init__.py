"""Terminal monitor of a run: frame layout and drawing; `nsa.cli.monitor` shows it on the screen."""
