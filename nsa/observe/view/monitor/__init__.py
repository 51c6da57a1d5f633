"""The live terminal view of a run: what to show, and how it is drawn; `nsa.cli.monitor` puts it on the screen."""
