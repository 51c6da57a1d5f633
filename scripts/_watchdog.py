"""Watch a run, with the runbook's options: --dir D --halt 1 --interval 30. The same as `nsa watch`."""

import sys

from nsa_train.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["watch"]
    main()
