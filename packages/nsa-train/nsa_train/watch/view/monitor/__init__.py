"""Terminal monitor of a run: frame layout and drawing; `nsa_train.cli.monitor` shows it on the screen."""
