"""Check that a run trained, as the runbook has it: --csv C --heartbeat H --min-steps N. The same as `nsa smoke`."""

import sys

from nsa_train.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["smoke"]
    main()
