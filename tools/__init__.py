"""Developer tools outside the installed package: GPU performance model, compile reports, generated docs, mutations."""
