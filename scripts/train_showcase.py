"""Train the config that CONFIG names, with the runbook's options. The same as `nsa train`."""

import sys

from nsa_train.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["train"]
    main()
